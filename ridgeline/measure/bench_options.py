"""One bench run from its options: workload, arrivals, amount, and what is promised."""

from __future__ import annotations

import math

import msgspec

from ridgeline.errors import BadInput
from ridgeline.measure.client.load_client import LoadOptions, OnFinish, OnStart, run_load
from ridgeline.measure.client.target import Target
from ridgeline.measure.workload import Workload, parse_workload
from ridgeline.measure.workload.arrivals import (
    Arrivals,
    Closed,
    Instants,
    Ramp,
    arrivals_from_flags,
    replay,
)
from ridgeline.measure.workload.base import StopsEarly, Unstreamed
from ridgeline.measure.workload.synthetic import Synthetic
from ridgeline.measure.workload.traces import TraceWorkload
from ridgeline.records import RunTrace, Slo

METRICS = ("ttft", "tpot", "itl", "e2e")
_ALIASES = {"e2el": "e2e"}


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of `ridgeline bench` under vLLM's names (`vllm bench serve`), as written."""

    workload: str = "chat-and-code"
    num_prompts: int | None = 100
    duration_s: float | None = None
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ramp_up_strategy: str | None = None
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None
    replay_speed: float | None = None
    random_input_len: int | None = None
    random_output_len: int | None = None
    random_prefix_len: int = 0
    ignore_eos: bool = True
    stream: bool = True
    goodput: str | None = None
    percentile_metrics: str = "ttft,tpot,itl,e2e"
    metric_percentiles: str = "50,90,95,99"
    num_warmups: int = 4
    warmup_s: float = 0.0
    cooldown_s: float = 0.0
    timeout_s: float = 600.0
    seed: int = 0

    @property
    def slo(self) -> Slo | None:
        return Slo.parse(self.goodput) if self.goodput else None

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics to show, in the order asked."""
        asked = [part.strip() for part in self.percentile_metrics.split(",") if part.strip()]
        names = tuple(_ALIASES.get(name, name) for name in asked)
        for name in names:
            if name not in METRICS:
                raise BadInput(
                    "--percentile-metrics: unknown", value=name, limit=", ".join(METRICS)
                )
        return names

    @property
    def percentiles(self) -> tuple[float, ...]:
        """The percentiles to show, 0..100."""
        try:
            values = tuple(float(part) for part in self.metric_percentiles.split(","))
        except ValueError:
            values = (math.nan,)
        if not all(0 <= value <= 100 for value in values):
            raise BadInput(
                "--metric-percentiles: not percentiles",
                value=self.metric_percentiles,
                limit="0..100",
                fix="write e.g. 50,90,99",
            )
        return values


def check(options: BenchOptions) -> None:
    """Raise what is wrong with the options, before anything is loaded."""
    _ = (options.slo, options.metrics, options.percentiles)
    workload_of(options)
    arrivals_of(options)
    load_of(options)


def workload_of(options: BenchOptions) -> Workload:
    """--random-input-len and --random-output-len stand for a synthetic workload."""
    if options.random_input_len is None and options.random_output_len is None:
        return parse_workload(options.workload)
    default = Synthetic()
    return Synthetic(
        input=default.input if options.random_input_len is None else options.random_input_len,
        output=default.output if options.random_output_len is None else options.random_output_len,
        prefix=options.random_prefix_len,
    )


def arrivals_of(options: BenchOptions) -> Arrivals:
    """Of the flags; at most one of a rate, a ramp and a replay."""
    ramp = (options.ramp_up_strategy, options.ramp_up_start_rps, options.ramp_up_end_rps)
    asked = [
        name
        for name, given in (
            ("--request-rate", not math.isinf(options.request_rate)),
            ("--ramp-up-…", any(each is not None for each in ramp)),
            ("--replay-speed", options.replay_speed is not None),
        )
        if given
    ]
    if len(asked) > 1:
        raise BadInput(f"{asked[0]} and {asked[1]} exclude each other", fix=f"drop {asked[1]}")
    if "--ramp-up-…" in asked:
        return _ramp(options)
    if options.replay_speed is not None:
        return _replay(options, options.replay_speed)
    return arrivals_from_flags(options.request_rate, options.burstiness, options.max_concurrency)


def _ramp(options: BenchOptions) -> Ramp:
    """vLLM's flags; the ramp takes the whole run."""
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
    over_s = options.duration_s or (options.num_prompts or 1) / ramp.expected
    return msgspec.structs.replace(ramp, over_s=over_s)


def _replay(options: BenchOptions, speed: float) -> Instants:
    workload = workload_of(options)
    if not isinstance(workload, TraceWorkload):
        raise BadInput(
            "--replay-speed needs a workload with instants",
            value=options.workload,
            limit="azure:FILE, burstgpt:FILE, mooncake:FILE",
        )
    return replay(workload.at_s, speed)


def load_of(options: BenchOptions) -> LoadOptions:
    return LoadOptions(
        num_requests=options.num_prompts,
        duration_s=options.duration_s,
        max_concurrency=None if _closed(options) else options.max_concurrency,
        num_warmups=options.num_warmups,
        timeout_s=options.timeout_s,
        seed=options.seed,
    )


def _closed(options: BenchOptions) -> bool:
    """A concurrency without any schedule is a closed loop, and not a cap on an open one."""
    return isinstance(arrivals_of(options), Closed)


async def run_bench(
    target: Target,
    options: BenchOptions,
    *,
    on_finish: OnFinish | None = None,
    on_start: OnStart | None = None,
) -> RunTrace:
    """Measure `target` as the options say. The target stays open."""
    workload = workload_of(options)
    if not options.ignore_eos:
        workload = StopsEarly(workload)
    if not options.stream:
        workload = Unstreamed(workload)
    return await run_load(
        target,
        workload,
        arrivals_of(options),
        load_of(options),
        on_finish=on_finish,
        on_start=on_start,
    )
