"""One bench run from its options: workload, arrivals, amount of load."""

from __future__ import annotations

import math

import msgspec

from ridgeline.config.load import BenchOptions
from ridgeline.errors import BadInput
from ridgeline.measure.client.load_client import LoadOptions, OnFinish, OnStart, run_load
from ridgeline.measure.client.target import LoadTarget
from ridgeline.measure.workload import Workload, parse_workload
from ridgeline.measure.workload.arrivals import (
    Arrivals,
    Closed,
    Ramp,
    RecordedArrivals,
    arrivals_from_flags,
    burst,
    replay,
)
from ridgeline.measure.workload.base import StopsEarly, Unstreamed
from ridgeline.measure.workload.synthetic import Synthetic
from ridgeline.measure.workload.traces import TraceWorkload
from ridgeline.records import RunTrace


def check_options(options: BenchOptions) -> None:
    """Validate the options before a model is loaded. Raises BadInput."""
    _ = (options.metrics, options.percentiles)
    workload_of(options)
    arrivals_of(options)
    load_options(options)


def workload_of(options: BenchOptions) -> Workload:
    """The workload to send; --input-len and --output-len describe a synthetic one."""
    if options.input_len is None and options.output_len is None:
        return parse_workload(options.workload)
    default = Synthetic()
    return Synthetic(
        input=default.input if options.input_len is None else options.input_len,
        output=default.output if options.output_len is None else options.output_len,
        prefix=options.prefix_len,
    )


def arrivals_of(options: BenchOptions) -> Arrivals:
    """The arrival process: at most one of a rate, a ramp and a replay. Raises BadInput."""
    ramp = (options.ramp_up_strategy, options.ramp_up_start_rps, options.ramp_up_end_rps)
    chosen = [
        name
        for name, given in (
            ("--request-rate", not math.isinf(options.request_rate)),
            ("--ramp-up-…", any(value is not None for value in ramp)),
            ("--replay-speed", options.replay_speed is not None),
        )
        if given
    ]
    if len(chosen) > 1:
        raise BadInput(
            f"{chosen[0]} cannot be combined with {chosen[1]}", fix=f"remove {chosen[1]}"
        )
    if "--ramp-up-…" in chosen:
        return _ramp(options)
    if options.replay_speed is not None:
        return _replay(options, options.replay_speed)
    return arrivals_from_flags(options.request_rate, options.burstiness, options.max_concurrency)


def _ramp(options: BenchOptions) -> Ramp:
    """A ramp over the whole run, from vLLM's flags."""
    strategy, low, high = (
        options.ramp_up_strategy,
        options.ramp_up_start_rps,
        options.ramp_up_end_rps,
    )
    if strategy not in ("linear", "exponential") or low is None or high is None:
        raise BadInput(
            "a ramp needs a strategy, a start and an end",
            value=f"{strategy} {low} {high}",
            limit="linear, exponential",
            fix="--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 16",
        )
    ramp = Ramp(low, high, 1.0, exponential=strategy == "exponential")
    over_s = options.duration_s or (options.max_requests or 1) / ramp.expected
    return msgspec.structs.replace(ramp, over_s=over_s)


def _replay(options: BenchOptions, speed: float) -> RecordedArrivals:
    workload = workload_of(options)
    if not isinstance(workload, TraceWorkload):
        raise BadInput(
            "--replay-speed needs a workload with recorded arrival times",
            value=options.workload,
            limit="azure:FILE, burstgpt:FILE, mooncake:FILE",
        )
    return replay(workload.at_s, speed)


def load_options(options: BenchOptions) -> LoadOptions:
    return LoadOptions(
        num_requests=options.max_requests,
        duration_s=options.duration_s,
        max_concurrency=None if _closed(options) else options.max_concurrency,
        num_warmups=options.num_warmups,
        timeout_s=options.timeout_s,
        seed=options.seed,
    )


def _closed(options: BenchOptions) -> bool:
    """A concurrency without an arrival rate is a closed loop, not a limit on an open one."""
    return isinstance(arrivals_of(options), Closed)


def most_at_once(options: BenchOptions) -> int | None:
    """The most requests in flight; None where only the server's speed bounds them."""
    if options.max_concurrency is not None:
        return min(options.max_concurrency, options.max_requests or options.max_concurrency)
    return options.max_requests if arrivals_of(options) == burst() else None


async def run_bench(
    target: LoadTarget,
    options: BenchOptions,
    *,
    on_finish: OnFinish | None = None,
    on_start: OnStart | None = None,
) -> RunTrace:
    """Measure `target` under the load of the options. The target stays open."""
    workload = workload_of(options)
    if not options.ignore_eos:
        workload = StopsEarly(workload)
    if not options.stream:
        workload = Unstreamed(workload)
    return await run_load(
        target,
        workload,
        arrivals_of(options),
        load_options(options),
        on_finish=on_finish,
        on_start=on_start,
    )
