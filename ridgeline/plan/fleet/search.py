"""Searches devices, layouts, formats, budgets and batches for the cheapest fleet within an SLO.

A candidate is one replica at a mean number of requests in flight, `batch`. Arrivals are Poisson.
The number in flight would be Poisson too if answers took the same time at any load; since they slow
down with load, it spreads further (`concurrency`). `max_num_seqs`, three standard deviations above
the mean, must fit the KV cache. The rate of a replica follows from Little's law, including waits,
so it stays below the replica's capacity. TTFT and TPOT are quantiles at the SLO's attainment
(`ridgeline.plan.fleet.queueing`); TTFT is that of the 95th percentile prompt. The number of
replicas follows from the demand. Thousands of candidates take seconds; the best can then be
simulated with the engine's scheduler (`ridgeline simulate`), and both agree on which fleets meet
the SLO (tests/plan/test_plan_against_simulation.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ridgeline.errors import BadInput, UserError
from ridgeline.hardware.catalogue import Accelerator
from ridgeline.modelspec.cost.parameters import num_kv_heads
from ridgeline.modelspec.cost.serving_formats import WIDE_DTYPES, quantised_as
from ridgeline.modelspec.model import ModelSpec
from ridgeline.plan.calibration.published_efficiency import interval
from ridgeline.plan.fleet.cache_needs import cache_needs
from ridgeline.plan.fleet.demand import Demand, meets_slo
from ridgeline.plan.fleet.queueing import PoissonLoad, load_in_flight
from ridgeline.plan.step_time.adapters import NO_ADAPTERS, AdapterLoad
from ridgeline.plan.step_time.memory import MemoryLimits, memory_budget, require_context
from ridgeline.plan.step_time.operating_point import OperatingPoint
from ridgeline.plan.step_time.parallel_layout import NODE_DEVICES, Layout
from ridgeline.plan.step_time.predict import (
    decode_step_s,
    loads_of,
    mixed_steps,
    request_overhead_s,
)
from ridgeline.plan.step_time.replica import Replica, build_replica, served_dtype
from ridgeline.records import Slo
from ridgeline.records.price import Commitment, dollars_per_million

HOURS_PER_MONTH = 730
BATCH_STEP = 1.5
RATE_MARGIN = 0.95
"""Planned share of the rate at which the quantiles meet the SLO: where a queue is about to form,
they are up to 5 % of the rate off (tests/plan/test_plan_against_simulation.py)."""
ABANDON_RATIO = 3.0  # latencies this many times over the SLO end the search for larger batches
MAX_BATCH = 1024
MAX_EXPERT_DEVICES = 32
LONG_CONTEXT = 16_384
"""Tokens of the longest request from which context parallel layouts are searched: with shorter
ones, replicas with fewer devices divide the load as well, without messages."""
Interval = tuple[float, float]


class SearchSpace(msgspec.Struct, frozen=True, kw_only=True):
    """The options to search. Dtypes None: the checkpoint's, and fp8 if the device supports it."""

    devices: tuple[str, ...]
    weight_dtypes: tuple[str, ...] | None = None
    kv_dtypes: tuple[str, ...] | None = None
    token_budgets: tuple[int, ...] = (1024, 2048, 8192)
    max_devices_per_replica: int = 16
    dollars_per_month: float | None = None
    dollars_per_device_hour: float | None = None
    commitment: Commitment = "on-demand"
    adapters: AdapterLoad = NO_ADAPTERS


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One replica at one load, and the fleet of such replicas that serves the demand.

    Times in seconds. `ttft_s` and `tpot_s` are at the SLO's attainment (p95 by default): at the
    replica's full `rate`, of the fleets of a `SearchResult` at the demanded load. `max_num_seqs`:
    slots for three standard deviations above the mean `batch`. At the full rate, `holds`: the
    predictions meet the SLO; `sure`: the upper ends of the 80 % intervals do, too.
    """

    device: str
    layout: Layout
    weight_dtype: str
    kv_dtype: str
    max_num_batched_tokens: int
    batch: int
    max_num_seqs: int
    kv_tokens: int
    ttft_s: float
    tpot_s: float
    decode_s: float
    prefill_s: float
    rate: float
    num_replicas: int
    num_devices: int
    tok_s_user: float
    tok_s_device: float
    holds: bool
    sure: bool
    ttft_interval_s: Interval
    tpot_interval_s: Interval
    dollars_per_hour: float | None
    input_dollars_per_mtok: float | None
    output_dollars_per_mtok: float | None
    watts: float | None
    joules_per_output_token: float | None


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search.

    `fleets`: fleets that meet the SLO, cheapest first, one per replica kind. `front`: the Pareto
    front of tok/s per user and tok/s per device. `left_out`: excluded kinds with the reason.
    `over_budget`: the cheapest fleet that meets the SLO, if all of them exceed the budget.
    """

    num_candidates: int
    fleets: tuple[Candidate, ...]
    front: tuple[Candidate, ...]
    left_out: dict[str, str]
    over_budget: Candidate | None = None


def search(
    spec: ModelSpec,
    demand: Demand,
    slo: Slo,
    space: SearchSpace,
    catalogue: Mapping[str, Accelerator],
) -> SearchResult:
    """Evaluate every candidate.

    Raises BadInput for a workload longer than the model's context, or an SLO without any limit that
    applies to it.
    """
    check_demand(spec, demand)
    _check_slo(slo, demand)
    left_out: dict[str, str] = {}
    everything: list[Candidate] = []
    for machine in enumerate_replicas(spec, space, catalogue, left_out, demand.longest):
        before = len(everything)
        everything += _candidates(machine, demand, slo, space)
        if len(everything) == before:
            left_out[_kind(machine)] = "its memory fits no request of the workload"
    meeting = [candidate for candidate in everything if candidate.holds]
    affordable = [candidate for candidate in meeting if _affordable(candidate, space)]
    fleets = sorted(_best_of_kind(affordable), key=ranking_key)
    return SearchResult(
        num_candidates=len(everything),
        fleets=tuple(
            _at_demand(spec, fleet, demand, slo, catalogue, space.adapters) for fleet in fleets
        ),
        front=pareto_front(everything),
        left_out=left_out,
        over_budget=None if affordable or not meeting else min(meeting, key=ranking_key),
    )


def check_demand(spec: ModelSpec, demand: Demand) -> None:
    """Raise BadInput if a request would not fit the model's context."""
    require_context(spec, demand.longest)


def _check_slo(slo: Slo, demand: Demand) -> None:
    if demand.osl == 1 and slo.ttft_s is None and slo.e2e_s is None:
        raise BadInput(
            "answers of one token have no TPOT, and the SLO has no other limit",
            value=str(slo),
            fix="add ttft or e2e to the SLO",
        )
    if slo.attainment >= 1:
        raise BadInput(
            "with random arrivals no latency limit holds for every request",
            value=f"attainment:{slo.attainment:g}",
            limit="below 1",
            fix="lower the attainment, for example attainment:99%",
        )


def _kind(machine: Replica) -> str:
    return f"{machine.device.name} {machine.layout} {machine.weight_dtype} kv {machine.kv_dtype}"


def enumerate_replicas(
    spec: ModelSpec,
    space: SearchSpace,
    catalogue: Mapping[str, Accelerator],
    left_out: dict[str, str],
    longest: int = 0,
) -> Iterator[Replica]:
    """Yield every replica kind of the space; `left_out` receives the reasons for excluded kinds.

    `longest`: tokens of the longest request.
    """
    for name in space.devices:
        device = catalogue[name]
        for layout in enumerate_layouts(spec, space.max_devices_per_replica, longest):
            for weights in space.weight_dtypes or _weights(spec, device):
                for kv in space.kv_dtypes or _kvs(spec, device, weights):
                    if layout.dcp > 1 and (device.kind != "gpu" or kv not in WIDE_DTYPES):
                        continue  # no engine is known that starts it
                    try:
                        machine = build_replica(
                            spec, device, layout, weight_dtype=weights, kv_dtype=kv
                        )
                        yield space.adapters.on(machine)
                    except UserError as error:
                        left_out[f"{name} {layout} {weights}"] = str(error)


def enumerate_layouts(spec: ModelSpec, max_devices: int, longest: int = 0) -> Iterator[Layout]:
    """Layouts with tp within a node and pp; for routed models, attention replicated `dp` times over
    devices that share the experts: split, whole (ep), or whole within nodes and split beyond. With
    requests of `longest` tokens, from `LONG_CONTEXT` on, also with decode context parallelism."""
    if longest >= LONG_CONTEXT:
        yield from _context_layouts(spec, max_devices)
    sizes = (1, 2, 4, 8)
    for tp in sizes:
        for pp in (1, 2, 4):
            if tp * pp <= max_devices:
                yield Layout(tp=tp, pp=pp)
    if not any(layer.mlp.num_experts for layer in spec.layers):
        return
    for tp in sizes:
        for dp in (1, 2, 4, 8, 16, 32):
            devices = tp * dp
            if devices <= min(max_devices, MAX_EXPERT_DEVICES):
                for ep in sorted({1, min(devices, NODE_DEVICES), devices}):
                    if devices > 1 and (dp, ep) != (1, 1):
                        yield Layout(tp=tp, ep=ep, dp=dp)


def _context_layouts(spec: ModelSpec, max_devices: int) -> Iterator[Layout]:
    """Layouts over more devices than the model has KV heads, which divide what plain tp would store
    several times; the experts of routed models are split, or whole on some of the devices."""
    heads, is_routed = num_kv_heads(spec), any(layer.mlp.num_experts for layer in spec.layers)
    for tp in (2, 4, 8):
        if tp <= max_devices and heads < tp and tp % heads == 0:
            yield Layout(tp=tp, dcp=tp // heads)
            if is_routed:
                yield Layout(tp=tp, dcp=tp // heads, ep=tp)


def other_layouts(
    machine: Replica, max_devices: int, adapters: AdapterLoad = NO_ADAPTERS
) -> Iterator[Replica]:
    """The same model, device, formats and adapters in every other layout that can run."""
    for layout in enumerate_layouts(machine.spec, max_devices):
        if layout != machine.layout:
            try:
                other = build_replica(
                    machine.spec,
                    machine.device,
                    layout,
                    weight_dtype=machine.weight_dtype,
                    kv_dtype=machine.kv_dtype,
                )
                yield adapters.on(other)
            except UserError:
                continue


def _weights(spec: ModelSpec, device: Accelerator) -> tuple[str, ...]:
    stored = quantised_as(spec) or served_dtype(spec, device)
    if stored in ("bfloat16", "float16") and "float8_e4m3" in device.peak_flops:
        return (stored, "float8_e4m3")
    return (stored,)


def _kvs(spec: ModelSpec, device: Accelerator, weights: str) -> tuple[str, ...]:
    served = served_dtype(spec, device, weights)
    return (served, "float8_e4m3") if "float8_e4m3" in device.peak_flops else (served,)


def batch_sizes() -> Iterator[int]:
    """1, 2, 3, … up to `MAX_BATCH`, growing by a factor of about `BATCH_STEP`."""
    batch = 1
    while batch <= MAX_BATCH:
        yield batch
        batch = max(batch + 1, int(batch * BATCH_STEP))


def _candidates(
    machine: Replica, demand: Demand, slo: Slo, space: SearchSpace
) -> Iterator[Candidate]:
    """A candidate for each batch and token budget that fits this replica."""
    price = _price(machine.device, space)
    needs = cache_needs(machine, demand)
    for tokens in space.token_budgets:
        for batch in batch_sizes():
            point = _point(demand, batch, tokens)
            spread = concurrency(machine, point, demand.input_cv2)
            if spread is None:
                break
            limits = MemoryLimits(max_num_batched_tokens=tokens, max_num_seqs=spread.max_num_seqs)
            kv_tokens = needs.room(memory_budget(machine, limits).kv_tokens)
            if kv_tokens < max(needs.longest, spread.max_num_seqs * needs.per_request):
                break
            candidate = _candidate(machine, demand, slo, (point, spread, kv_tokens), price)
            yield candidate
            if _far_beyond(candidate, slo):
                break


def _far_beyond(candidate: Candidate, slo: Slo) -> bool:
    pairs = ((candidate.tpot_s, slo.tpot_s), (candidate.ttft_s, slo.ttft_s))
    return any(limit is not None and value > ABANDON_RATIO * limit for value, limit in pairs)


def _candidate(
    machine: Replica,
    demand: Demand,
    slo: Slo,
    chosen: tuple[OperatingPoint, Concurrency, int],
    price: float | None,
) -> Candidate:
    point, spread, kv_tokens = chosen
    at, decode_s = spread.at, decode_step_s(machine, point)
    ttft_s, tpot_s = _latency_quantiles(machine, demand, slo, point, spread)
    rate = RATE_MARGIN * at.rate
    num_replicas = demand.replicas_at(rate, decode_s)
    num_devices = num_replicas * machine.layout.num_devices
    eff = machine.efficiency
    ttft, tpot = interval(ttft_s, eff.ttft_error), interval(tpot_s, machine.tpot_error)
    tdp_w = machine.device.tdp_w
    watts = None if tdp_w is None else tdp_w * num_devices
    dollars = None if price is None else price * num_devices
    share = _input_share(at.prompt_s, demand.osl * decode_s / point.batch)
    served = demand.rate * (1 - demand.fallback)
    return Candidate(
        device=machine.device.name,
        layout=machine.layout,
        weight_dtype=machine.weight_dtype,
        kv_dtype=machine.kv_dtype,
        max_num_batched_tokens=point.tokens_per_step(machine),
        batch=point.batch,
        max_num_seqs=spread.max_num_seqs,
        kv_tokens=kv_tokens,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        decode_s=decode_s,
        prefill_s=at.added_s,
        rate=rate,
        num_replicas=num_replicas,
        num_devices=num_devices,
        tok_s_user=1 / at.tpot_s,
        tok_s_device=rate * demand.osl / machine.layout.num_devices,
        holds=meets_slo(slo, ttft_s, tpot_s, demand.osl),
        sure=meets_slo(slo, ttft[1], tpot[1], demand.osl),
        ttft_interval_s=ttft,
        tpot_interval_s=tpot,
        dollars_per_hour=dollars,
        input_dollars_per_mtok=_per_mtok(dollars, share, served * demand.isl),
        output_dollars_per_mtok=_per_mtok(dollars, 1 - share, served * demand.osl),
        watts=watts,
        joules_per_output_token=None if watts is None else watts / (served * demand.osl),
    )


def _at_demand(
    spec: ModelSpec,
    fleet: Candidate,
    demand: Demand,
    slo: Slo,
    catalogue: Mapping[str, Accelerator],
    adapters: AdapterLoad,
) -> Candidate:
    """The fleet with the latencies of the demanded load, which may be far below its full rate; of
    the full rate where batch requests fill it."""
    if demand.batch_rate:
        return fleet
    machine = build_replica(
        spec,
        catalogue[fleet.device],
        fleet.layout,
        weight_dtype=fleet.weight_dtype,
        kv_dtype=fleet.kv_dtype,
    )
    machine = adapters.on(machine)
    serving = fleet.num_replicas - demand.canary_replicas(fleet.rate)
    rate, low, high = demand.computed_rate / serving, 1, fleet.batch
    while low < high:
        middle = (low + high) // 2
        point = _point(demand, middle, fleet.max_num_batched_tokens)
        if _poisson_load(machine, point, demand.input_cv2).rate < rate:
            low = middle + 1
        else:
            high = middle
    point = _point(demand, low, fleet.max_num_batched_tokens)
    spread = concurrency(machine, point, demand.input_cv2)
    if spread is None:
        return fleet
    ttft_s, tpot_s = _latency_quantiles(machine, demand, slo, point, spread)
    ttft_s, tpot_s = min(ttft_s, fleet.ttft_s), min(tpot_s, fleet.tpot_s)
    return msgspec.structs.replace(
        fleet,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        ttft_interval_s=interval(ttft_s, machine.efficiency.ttft_error),
        tpot_interval_s=interval(tpot_s, machine.tpot_error),
    )


class Concurrency(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution of the number of requests in flight.

    `at`: the load at the mean; `plus_one_sd`: mean plus one standard deviation; `max_num_seqs`:
    mean plus three.
    """

    at: PoissonLoad
    plus_one_sd: int
    max_num_seqs: int


def concurrency(machine: Replica, point: OperatingPoint, input_cv2: float) -> Concurrency | None:
    """The spread of the number n in flight around `point.batch`; None if the replica is saturated.

    Requests complete at the rate r(n) of a replica with n in flight and arrive at r(batch), so the
    variance of n is r / r'(n) (a birth-death process, to first order; n if r is proportional to n).
    The replica is saturated if r no longer grows with n.
    """
    at = _poisson_load(machine, point, input_cv2)
    wider = math.ceil(math.sqrt(point.batch))
    busier = msgspec.structs.replace(point, batch=point.batch + wider)
    steeper = _poisson_load(machine, busier, input_cv2)
    gained = steeper.rate - at.rate
    if gained <= 1e-6 * at.rate:
        return None
    deviation = math.sqrt(max(at.rate * wider / gained, point.batch))
    return Concurrency(
        at=at,
        plus_one_sd=math.ceil(point.batch + deviation),
        max_num_seqs=math.ceil(point.batch + 3 * deviation),
    )


def _poisson_load(machine: Replica, point: OperatingPoint, input_cv2: float) -> PoissonLoad:
    groups = machine.layout.num_attention
    return load_in_flight(mixed_steps(machine, point), point.osl, groups, point.batch, input_cv2)


def _latency_quantiles(
    machine: Replica, demand: Demand, slo: Slo, point: OperatingPoint, spread: Concurrency
) -> tuple[float, float]:
    """TTFT (of the 95th percentile prompt) and TPOT at the SLO's attainment."""
    found = demand.found + (0 if demand.tiers is None else demand.tiers.tokens)
    isl_p95 = demand.isl_p95 + demand.answers.question
    longest = msgspec.structs.replace(point, isl=max(isl_p95, found + 1))
    prompt_s = mixed_steps(machine, longest).prompt_s + request_overhead_s(machine)
    prompt_s += loads_of(machine, longest).wait_s + machine.efficiency.first_s
    decode_s, at = decode_step_s(machine, point), spread.at
    busier = msgspec.structs.replace(point, batch=spread.plus_one_sd)
    busier_s = decode_step_s(machine, busier) - decode_s
    return (
        at.ttft_quantile(slo.attainment, prompt_s, demand.input_cv2),
        at.tpot_quantile(slo.attainment, busier_s * at.step_s / decode_s),
    )


def _input_share(prompt_s: float, answer_s: float) -> float:
    """The share of the cost charged to prompts, idle time included.

    Proportional to the device seconds of prompts and of decoding if each ran alone. Charging only
    the time that a prompt adds to a decode step would make prompt tokens free whenever that step is
    memory-bound.
    """
    return prompt_s / (prompt_s + answer_s)


def _point(demand: Demand, batch: int, tokens: int) -> OperatingPoint:
    return OperatingPoint(
        model="",
        device="",
        isl=demand.computed_isl,
        osl=demand.osl,
        batch=batch,
        cached=demand.found,
        tiers=demand.tiers,
        max_num_batched_tokens=tokens,
    )


def _per_mtok(dollars_per_hour: float | None, share: float, tok_s: float) -> float | None:
    return None if dollars_per_hour is None else dollars_per_million(dollars_per_hour, tok_s, share)


def _price(device: Accelerator, space: SearchSpace) -> float | None:
    if space.dollars_per_device_hour is not None:
        return space.dollars_per_device_hour
    chosen = device.price(space.commitment)
    return None if chosen is None else chosen.usd_per_hour


def _affordable(candidate: Candidate, space: SearchSpace) -> bool:
    if space.dollars_per_month is None:
        return True
    if candidate.dollars_per_hour is None:
        return False
    return candidate.dollars_per_hour * HOURS_PER_MONTH <= space.dollars_per_month


def ranking_key(candidate: Candidate) -> tuple[float, bool, float, int]:
    """Sort key: price, then whether the interval's upper end meets the SLO, watts, devices."""
    dollars = math.inf if candidate.dollars_per_hour is None else candidate.dollars_per_hour
    watts = math.inf if candidate.watts is None else candidate.watts
    return (dollars, not candidate.sure, watts, candidate.num_devices)


def _best_of_kind(candidates: Sequence[Candidate]) -> list[Candidate]:
    best: dict[tuple[object, ...], Candidate] = {}
    for candidate in candidates:
        kind = (candidate.device, candidate.layout, candidate.weight_dtype, candidate.kv_dtype)
        known = best.get(kind)
        if known is None or ranking_key(candidate) < ranking_key(known):
            best[kind] = candidate
    return list(best.values())


def pareto_front(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The candidates not dominated in tok/s per user and tok/s per device, by tok/s per user."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (-c.tok_s_user, -c.tok_s_device)):
        if not front or candidate.tok_s_device > front[-1].tok_s_device:
            front.append(candidate)
    return tuple(reversed(front))
