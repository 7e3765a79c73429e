"""`ridgeline simulate`: a fleet under a load, on a virtual clock."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console

from ridgeline.cli.commands.pack import stock
from ridgeline.cli.render.simulate import devices_of, table_of
from ridgeline.engine.scheduler import (
    BlockPool,
    NoPrefixCache,
    PrefixCache,
    Scheduler,
    SchedulerLimits,
    make_policy,
)
from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import Accelerator, find_accelerator
from ridgeline.measure.client import MOST_REQUESTS
from ridgeline.measure.workload import parse_workload
from ridgeline.measure.workload.synthetic import MOST_TOKENS
from ridgeline.measure.workload.traces import MOONCAKE_BLOCK, TraceWorkload
from ridgeline.modelspec.cost.serving_formats import kv_dtype, weight_dtype
from ridgeline.plan.calibration.interference import MIDDLE, Sky
from ridgeline.plan.model.outline import load_outline
from ridgeline.plan.simulate.block_counter import CountedPool
from ridgeline.plan.simulate.fleet import (
    Build,
    Faults,
    FleetPlan,
    Outcome,
    Scaling,
    SimulatedRequest,
    simulate_fleet,
)
from ridgeline.plan.simulate.off_peak import OffPeak
from ridgeline.plan.simulate.summary import summarise, traces
from ridgeline.plan.step_time.memory import BLOCK_SIZE, MemoryAsked, memory, require_fit
from ridgeline.plan.step_time.parallel_layout import NETWORK_BYTES_S, Layout
from ridgeline.plan.step_time.predict import limits_of
from ridgeline.plan.step_time.replica import Replica, replica
from ridgeline.plan.step_time.simulated import Modelled, Pace
from ridgeline.plan.step_time.speculation import Speculation
from ridgeline.records import RunTrace, Slo
from ridgeline.report.files import write_file
from ridgeline.report.json_line import json_line
from ridgeline.workflows.bench.workload_lengths import ISL, OSL, is_text, workload_lengths
from ridgeline.workflows.planning.predict import chosen_device, read_catalogue

SHOWN_REQUESTS = 4000

MOST_REPLICAS, LONGEST_S = 10_000, 1e9
LIMITS: dict[str, tuple[float, float]] = {
    "isl": (1, MOST_TOKENS),
    "osl": (1, MOST_TOKENS),
    "num_prompts": (1, MOST_REQUESTS),
    "replicas": (1, MOST_REPLICAS),
    "decode_replicas": (0, MOST_REPLICAS),
    "autoscale": (1, MOST_REPLICAS),
    "batch_share": (0.0, 1.0),
    "target_in_flight": (1e-3, 1e6),
    "startup_s": (0.0, LONGEST_S),
    "mtbf_s": (1.0, LONGEST_S),
    "repair_s": (0.0, LONGEST_S),
}
"""Of a fleet's numbers, by flag: the least and the most."""


class SimulateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command's flags."""

    model: str
    device: str | None
    tp: int
    pp: int
    ep: int
    weight_dtype: str | None
    kv_dtype: str | None
    replicas: int
    decode_replicas: int
    router: str
    workload: str | None
    isl: int | None
    osl: int | None
    rate: float
    num_prompts: int
    replay_speed: float | None
    batch_share: float
    off_peak: str | None
    num_speculative_tokens: int
    acceptance: float | None
    slo: str | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    prefix_caching: bool
    autoscale: int | None
    target_in_flight: float
    startup_s: float
    mtbf_s: float | None
    repair_s: float
    catalogue: Path | None
    calibration: Path | None
    html: Path | None
    trace: Path | None
    seed: int
    num_seeds: int
    step_by_step: bool


def run(options: SimulateOptions) -> tuple[list[Replica], Outcome]:
    """One fleet under one load; all that decides it is in the options. The kinds of its replicas,
    and what happened."""
    _check(options)
    requests = _requests(options)
    kinds = _kinds(options)
    longest = max(request.num_prompt + request.num_output for request in requests)
    plan = _fleet(options, kinds, longest)
    gc.disable()  # nothing here is garbage in cycles, and there are millions of records to walk
    try:
        return [machine for machine, _ in kinds], simulate_fleet(requests, plan)
    finally:
        gc.enable()


def command(options: SimulateOptions, as_json: bool) -> int:
    """Simulate and print; the exit code."""
    if options.num_seeds > 1:
        from ridgeline.workflows.planning.repeated_seeds import command as of_seeds

        return of_seeds(options, as_json)
    slo = None if options.slo is None else Slo.parse(options.slo)
    machines, outcome = run(options)
    found = summarise(outcome, slo)
    _write(options, devices_of(machines), outcome, slo)
    if as_json:
        print(json_line(found))
        return 0
    out = Console(highlight=False)
    out.print(table_of(options.replicas, machines, outcome, found))
    for note in _notes(options, machines):
        out.print(f"- {note}", style="dim", soft_wrap=True, markup=False)
    return 0


def _check(options: SimulateOptions) -> None:
    """Refuse numbers that no fleet has, and those that would not end."""
    for name, (low, high) in LIMITS.items():
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            flag = f"--{name.replace('_', '-')}"
            raise BadInput(f"{flag} is out of range", value=value, limit=f"{low:,} to {high:,}")


def _kinds(options: SimulateOptions) -> list[tuple[Replica, int]]:
    """Kinds of replicas, and how many of each: `--device h100-sxm=2,l40s=4` has two."""
    rows = read_catalogue(options.catalogue, options.calibration)
    device = chosen_device(options.device, rows)
    if device is None:
        raise BadInput("simulate needs a --device, or a --calibration", value=device)
    if "=" not in device:
        return [(_machine(options, find_accelerator(device, rows)), options.replicas)]
    if options.replicas != 1 or options.decode_replicas or options.autoscale is not None:
        raise BadInput(
            "a fleet of several devices is as large as --device says, and stays so",
            value=device,
            fix="leave out --replicas, --decode-replicas and --autoscale",
        )
    return [(_machine(options, rows[name]), count) for name, count in stock(device, rows).items()]


def _machine(options: SimulateOptions, device: Accelerator) -> Replica:
    return replica(
        load_outline(options.model),
        device,
        Layout(tp=options.tp, pp=options.pp, ep=options.ep),
        weight_dtype=None if options.weight_dtype is None else weight_dtype(options.weight_dtype),
        kv_dtype=None if options.kv_dtype is None else kv_dtype(options.kv_dtype),
    )


def _build(options: SimulateOptions, machine: Replica, longest: int) -> Build:
    if machine.layout.pp > 1 or machine.layout.num_attention > 1:
        raise BadInput(
            "a replica of several stages or attention groups cannot be simulated yet",
            value=str(machine.layout),
            fix="use tp, and ep up to tp",
        )
    seats, tokens = limits_of(machine, options.max_num_seqs, options.max_num_batched_tokens)
    asked = MemoryAsked(max_num_batched_tokens=tokens, max_num_seqs=seats)
    fits = memory(machine, asked)
    require_fit(machine, fits, longest)
    limits = SchedulerLimits(
        max_num_seqs=seats,
        max_num_batched_tokens=tokens,
        max_model_len=min(machine.outline.max_positions, max(longest, 1)),
    )

    def scheduler() -> Scheduler:
        num_blocks = fits.kv_tokens // BLOCK_SIZE
        named = options.prefix_caching or options.batch_share  # blocks that are looked at
        pool = (BlockPool if named else CountedPool)(num_blocks, BLOCK_SIZE)
        cache = PrefixCache(pool) if options.prefix_caching else NoPrefixCache()
        return Scheduler(limits, make_policy("continuous"), pool, cache)

    pace: Pace = Modelled(machine, _drafts(options))
    known = machine.calibration
    weather = None if known is None else known.weather
    level = MIDDLE if options.num_seeds == 1 else None
    return Build(
        name=machine.device.name,
        scheduler=scheduler,
        pace=pace,
        num_devices=machine.layout.num_devices,
        asking_s=0.0 if known is None else known.overheads.reader_first_s,
        sky=None if weather is None else partial(Sky, weather, options.seed, level=level),
    )


def _fleet(
    options: SimulateOptions, kinds: Sequence[tuple[Replica, int]], longest: int
) -> FleetPlan:
    builds = [(_build(options, machine, longest), count) for machine, count in kinds]
    if sum(count for _, count in kinds) > MOST_REPLICAS:
        raise BadInput("--device names too many replicas", limit=f"{MOST_REPLICAS:,}")
    return FleetPlan(
        builds=tuple(build for build, count in builds for _ in range(count)),
        decode=(builds[0][0],) * options.decode_replicas,
        transfer_s=_transfer(kinds[0][0]) if options.decode_replicas else None,
        router=options.router,
        scaling=_scaling(options),
        faults=None
        if options.mtbf_s is None
        else Faults(mtbf_s=options.mtbf_s, repair_s=options.repair_s),
        seed=options.seed,
        leaps=not options.step_by_step,
    )


def _drafts(options: SimulateOptions) -> Speculation | None:
    if not options.num_speculative_tokens:
        return None
    if options.acceptance is None:
        raise BadInput("speculation needs the acceptance of drafts", fix="give --acceptance")
    return Speculation(num_tokens=options.num_speculative_tokens, acceptance=options.acceptance)


def _transfer(machine: Replica) -> Callable[[int], float]:
    """Seconds of a prompt's KV over the network, every device sending its share."""
    rate = NETWORK_BYTES_S * machine.layout.num_devices
    return lambda tokens: machine.kv_bytes(tokens) * machine.kv_copies / rate


def _scaling(options: SimulateOptions) -> Scaling | None:
    if options.autoscale is None:
        return None
    return Scaling(
        target=options.target_in_flight,
        most=options.autoscale,
        least=options.replicas,
        startup_s=options.startup_s,
    )


def _requests(options: SimulateOptions) -> list[SimulatedRequest]:
    """The load: a recorded one with its own instants, or lengths under Poisson arrivals."""
    if options.workload is not None:
        source = parse_workload(options.workload)
        if isinstance(source, TraceWorkload):
            return _recorded(options, source)
        lengths = workload_lengths(options.workload, options.num_prompts, options.seed)
    else:
        lengths = [(options.isl or ISL, options.osl or OSL)] * options.num_prompts
    if options.replay_speed is not None:
        raise BadInput("--replay-speed needs a recorded workload", value=options.workload)
    return _arranged(options, [(*pair, ()) for pair in lengths], _poisson(options, len(lengths)))


def _recorded(options: SimulateOptions, source: TraceWorkload) -> list[SimulatedRequest]:
    rows = source.rows[: options.num_prompts]
    lengths = [(row.num_input, row.num_output, row.blocks) for row in rows]
    if options.replay_speed is None:
        return _arranged(options, lengths, _poisson(options, len(rows)))
    began_s = rows[0].at_s
    at_s = [(row.at_s - began_s) / options.replay_speed for row in rows]
    return _arranged(options, lengths, at_s)


def _poisson(options: SimulateOptions, count: int) -> list[float]:
    if not options.rate > 0:
        raise BadInput("the request rate must be positive", value=options.rate)
    gaps = np.random.default_rng(options.seed).exponential(1 / options.rate, count)
    return [float(at) for at in np.cumsum(gaps)]


def _arranged(
    options: SimulateOptions,
    lengths: Sequence[tuple[int, int, tuple[int, ...]]],
    at_s: Sequence[float],
) -> list[SimulatedRequest]:
    """Requests in order; `batch_share` of them, drawn by the seed, are lines of batches, and wait
    for the off-peak window where there is one."""
    window = None if options.off_peak is None else OffPeak.parse(options.off_peak)
    if window is not None and not options.batch_share:
        raise BadInput("--off-peak has no effect without --batch-share", value=options.off_peak)
    drawn = np.random.default_rng(options.seed + 1).random(len(lengths))
    return [
        SimulatedRequest(
            at_s=at,
            num_prompt=num_prompt,
            num_output=num_output,
            prefix=blocks,
            prefix_block=MOONCAKE_BLOCK,
            session=str(i),
            background=low,
            kind="batch" if low else "",
            not_before_s=window.opens_s(at) if low and window is not None else 0.0,
        )
        for i, ((num_prompt, num_output, blocks), at, low) in enumerate(
            zip(lengths, at_s, (drawn < options.batch_share).tolist(), strict=True)
        )
    ]


def _write(options: SimulateOptions, device: str, outcome: Outcome, slo: Slo | None) -> None:
    if options.html is None and options.trace is None:
        return
    isl, osl = options.isl or ISL, options.osl or OSL
    run = RunTrace(
        target=f"{options.replicas} x {options.model} on {device} (simulated)",
        workload=options.workload or f"synthetic:input={isl},output={osl}",
        arrivals=f"poisson:{options.rate:g}" if options.replay_speed is None else "recorded",
        seed=options.seed,
        started_unix_s=0.0,
        duration_s=outcome.duration_s,
        requests=(),
    )
    if options.trace is not None:
        from ridgeline.measure.report.perfetto import chrome_trace

        shown = msgspec.structs.replace(run, requests=traces(outcome, SHOWN_REQUESTS))
        write_file(options.trace, [msgspec.json.encode(chrome_trace(shown))])
    if options.html is not None:
        from ridgeline.measure.report.page import bench_page
        from ridgeline.measure.summary import summarise as of_run

        run = msgspec.structs.replace(run, requests=traces(outcome, len(outcome.lives)))
        # Tokens between the first and the last have no instants: gaps are not known.
        summary = msgspec.structs.replace(of_run(run, slo), itl=None, itl_chunk=None)
        write_file(options.html, [bench_page(run, summary, slo).encode()])


def _notes(options: SimulateOptions, machines: Sequence[Replica]) -> list[str]:
    machine = max(machines, key=lambda each: each.efficiency.tpot_error)
    eff = machine.efficiency
    told = [
        f"step times are modelled ({eff.as_of}); of the median such models are "
        f"{eff.tpot_error:.0%} (TPOT) and {eff.ttft_error:.0%} (TTFT) off on this device"
    ]
    if options.workload is not None and is_text(options.workload):
        told.append("the workload is text: its lengths are estimated at four bytes per token")
    known = machine.calibration
    if known is not None and known.weather is not None:
        span_s = known.weather.span_s
        told.append(
            f"the weather of the machine is played: {span_s:.0f} s as they were at calibration, "
            "from a place that the seed chooses; a single run is told half of it, --num-seeds 40 "
            "draw how much, the machine's mood and the fit's misfit"
        )
    if options.batch_share:
        told.append(
            "the promise, TTFT, TPOT and e2e are of those who wait for an answer; batch: a line's "
            "seconds from when it may begin"
        )
    if not options.prefix_caching:
        told.append("prefix caching is off")
    return told
