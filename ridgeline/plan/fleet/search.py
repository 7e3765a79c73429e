"""Which fleet: every device, layout, format, token budget and batch, priced against a promise.

A candidate is one replica at one mean number of requests in flight, `batch`. Arrivals are Poisson,
and so would be the number in flight, if answers took no longer where more of them are made; as they
do, it spreads further (`concurrency`): `seats`, three standard deviations above the mean, must fit the
KV cache. The rate of a replica follows from Little's law, waits included, so that it stays below
what the replica can take in; TTFT and TPOT are quantiles at the promise's attainment (`open_loop`),
TTFT that of the 95th percentile prompt. The number of replicas follows from the demand. Thousands
of candidates take seconds; the best can then be simulated with the engine's own scheduler
(`ridgeline simulate`), and the two agree on what holds (tests/plan/test_agreement.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ridgeline.errors import BadInput, UserError
from ridgeline.hardware.catalogue import Accelerator, Price
from ridgeline.modelspec.cost.serving_formats import quantised_as
from ridgeline.modelspec.model import ModelSpec
from ridgeline.plan.calibration.published_efficiency import interval
from ridgeline.plan.fleet.demand import Demand, meets_slo
from ridgeline.plan.fleet.queueing import PoissonLoad, load_in_flight
from ridgeline.plan.step_time.memory import MemoryLimits, memory_budget
from ridgeline.plan.step_time.parallel_layout import Layout
from ridgeline.plan.step_time.predict import (
    OperatingPoint,
    decode_step_s,
    mixed_steps,
    request_overhead_s,
)
from ridgeline.plan.step_time.replica import Replica, build_replica, served_dtype
from ridgeline.records import Slo
from ridgeline.records.price import dollars_per_million

HOURS_PER_MONTH = 730
BATCH_STEP = 1.5
HOPELESS = 3.0  # times a promised latency, beyond which larger batches are not looked at
MOST_BATCH = 1024
Interval = tuple[float, float]


class SearchSpace(msgspec.Struct, frozen=True, kw_only=True):
    """What may be chosen from. Dtypes None: the checkpoint's, and fp8 where the device has it."""

    devices: tuple[str, ...]
    weight_dtypes: tuple[str, ...] | None = None
    kv_dtypes: tuple[str, ...] | None = None
    token_budgets: tuple[int, ...] = (1024, 2048, 8192)
    max_devices_per_replica: int = 16
    dollars_per_month: float | None = None
    dollars_per_device_hour: float | None = None


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One replica at one load, and the fleet that the demand takes of it. Times in seconds."""

    device: str
    layout: Layout
    weight_dtype: str
    kv_dtype: str
    max_num_batched_tokens: int
    batch: int
    seats: int
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
    """`fleets`: those that keep the promise, cheapest first, one per replica kind. `pareto_front`: nobody
    is better in both tok/s per user and tok/s per device. `left_out`: why others are not there.
    `too_dear`: the cheapest fleet that keeps the promise, where the budget leaves none.
    """

    num_candidates: int
    fleets: tuple[Candidate, ...]
    front: tuple[Candidate, ...]
    left_out: dict[str, str]
    too_dear: Candidate | None = None


def search(
    spec: ModelSpec,
    demand: Demand,
    slo: Slo,
    space: SearchSpace,
    catalogue: Mapping[str, Accelerator],
) -> SearchResult:
    """Every candidate judged. Raises BadInput for a workload longer than the model's context, or
    one of which nothing was promised."""
    check_demand(spec, demand)
    _check_promise(slo, demand)
    left_out: dict[str, str] = {}
    everything: list[Candidate] = []
    for machine in enumerate_replicas(spec, space, catalogue, left_out):
        before = len(everything)
        everything += _of_machine(machine, demand, slo, space)
        if len(everything) == before:
            left_out[_kind(machine)] = "no request of the workload fits its memory"
    keeping = [each for each in everything if each.holds]
    holding = [each for each in keeping if _affordable(each, space)]
    return SearchResult(
        num_candidates=len(everything),
        fleets=tuple(sorted(_best_of_kind(holding), key=ranking_key)),
        front=pareto_front(everything),
        left_out=left_out,
        too_dear=None if holding or not keeping else min(keeping, key=ranking_key),
    )


def check_demand(spec: ModelSpec, demand: Demand) -> None:
    """BadInput where a request would not fit the model's context."""
    if demand.longest > spec.max_positions:
        raise BadInput(
            "the workload is longer than the model's context",
            value=f"{demand.longest} tokens",
            limit=spec.max_positions,
            fix="choose another workload, or a model with a longer context",
        )


def _check_promise(slo: Slo, demand: Demand) -> None:
    if demand.osl == 1 and slo.ttft_s is None and slo.e2e_s is None:
        raise BadInput(
            "answers of one token have no TPOT, and nothing else is promised",
            value=str(slo),
            fix="promise ttft or e2e",
        )
    if slo.attainment >= 1:
        raise BadInput(
            "under random arrivals no latency can be promised to everybody",
            value=f"attainment:{slo.attainment:g}",
            limit="below 1",
            fix="promise it to a share, as attainment:99%",
        )


def _kind(machine: Replica) -> str:
    return f"{machine.device.name} {machine.layout} {machine.weight_dtype} kv {machine.kv_dtype}"


def enumerate_replicas(
    spec: ModelSpec,
    space: SearchSpace,
    catalogue: Mapping[str, Accelerator],
    left_out: dict[str, str],
) -> Iterator[Replica]:
    """Every replica kind of the space; why one cannot be is noted in `left_out`."""
    for name in space.devices:
        device = catalogue[name]
        for layout in enumerate_layouts(spec, space.max_devices_per_replica):
            for weights in space.weight_dtypes or _weights(spec, device):
                for kv in space.kv_dtypes or _kvs(spec, device, weights):
                    try:
                        yield build_replica(spec, device, layout, weight_dtype=weights, kv_dtype=kv)
                    except UserError as error:
                        left_out[f"{name} {layout} {weights}"] = str(error)


def enumerate_layouts(spec: ModelSpec, most: int) -> Iterator[Layout]:
    """tp within a node, pp, and for routed models ep within and beyond tp."""
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4):
            if tp * pp <= most:
                yield Layout(tp=tp, pp=pp)
        if any(layer.mlp.num_experts for layer in spec.layers):
            for ep in (2, 4, 8, 16, 32):
                if max(tp, 2) <= ep <= most and ep % tp == 0:
                    yield Layout(tp=tp, ep=ep)


def _weights(spec: ModelSpec, device: Accelerator) -> tuple[str, ...]:
    stored = quantised_as(spec) or served_dtype(spec, device)
    if stored in ("bfloat16", "float16") and "float8_e4m3" in device.peak_flops:
        return (stored, "float8_e4m3")
    return (stored,)


def _kvs(spec: ModelSpec, device: Accelerator, weights: str) -> tuple[str, ...]:
    served = served_dtype(spec, device, weights)
    return (served, "float8_e4m3") if "float8_e4m3" in device.peak_flops else (served,)


def batch_sizes(most: int = MOST_BATCH) -> Iterator[int]:
    """1, 2, 3, … in steps of about `BATCH_STEP`."""
    batch = 1
    while batch <= most:
        yield batch
        batch = max(batch + 1, int(batch * BATCH_STEP))


def _of_machine(
    machine: Replica, demand: Demand, slo: Slo, space: SearchSpace
) -> Iterator[Candidate]:
    """Every batch and token budget that fits this replica."""
    price = _price(machine.device, space)
    per_request = machine.cost.kv_bytes(demand.isl + demand.osl) / machine.cost.kv_bytes_per_token
    longest = machine.cost.kv_bytes(demand.longest) / machine.cost.kv_bytes_per_token
    for tokens in space.token_budgets:
        for batch in batch_sizes():
            point = _point(demand, batch, tokens)
            crowd = concurrency(machine, point, demand.input_cv2)
            if crowd is None:
                break
            asked = MemoryLimits(max_num_batched_tokens=tokens, max_num_seqs=crowd.seats)
            fits = memory_budget(machine, asked).kv_tokens
            if fits < max(longest, crowd.seats * per_request):
                break
            found = _candidate(machine, demand, slo, (point, crowd, fits), price)
            yield found
            if _hopeless(found, slo):
                break


def _hopeless(found: Candidate, slo: Slo) -> bool:
    pairs = ((found.tpot_s, slo.tpot_s), (found.ttft_s, slo.ttft_s))
    return any(limit is not None and value > HOPELESS * limit for value, limit in pairs)


def _candidate(
    machine: Replica,
    demand: Demand,
    slo: Slo,
    chosen: tuple[OperatingPoint, Concurrency, int],
    price: float | None,
) -> Candidate:
    point, crowd, kv_tokens = chosen
    at, decode_s = crowd.at, decode_step_s(machine, point)
    ttft_s, tpot_s = _promised(machine, demand, slo, point, crowd)
    num_replicas = math.ceil(demand.rate / at.rate)
    num_devices = num_replicas * machine.layout.num_devices
    eff = machine.efficiency
    ttft, tpot = interval(ttft_s, eff.ttft_error), interval(tpot_s, eff.tpot_error)
    tdp_w = machine.device.tdp_w
    watts = None if tdp_w is None else tdp_w * num_devices
    dollars = None if price is None else price * num_devices
    share = _input_share(at.prompt_s, demand.osl * decode_s / point.batch)
    return Candidate(
        device=machine.device.name,
        layout=machine.layout,
        weight_dtype=machine.weight_dtype,
        kv_dtype=machine.kv_dtype,
        max_num_batched_tokens=point.tokens_per_step(machine),
        batch=point.batch,
        seats=crowd.seats,
        kv_tokens=kv_tokens,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        decode_s=decode_s,
        prefill_s=at.added_s,
        rate=at.rate,
        num_replicas=num_replicas,
        num_devices=num_devices,
        tok_s_user=1 / at.tpot_s,
        tok_s_device=at.rate * demand.osl / machine.layout.num_devices,
        holds=meets_slo(slo, ttft_s, tpot_s, demand.osl),
        sure=meets_slo(slo, ttft[1], tpot[1], demand.osl),
        ttft_interval_s=ttft,
        tpot_interval_s=tpot,
        dollars_per_hour=dollars,
        input_dollars_per_mtok=_per_mtok(dollars, share, demand.rate * demand.isl),
        output_dollars_per_mtok=_per_mtok(dollars, 1 - share, demand.rate * demand.osl),
        watts=watts,
        joules_per_output_token=None if watts is None else watts / (demand.rate * demand.osl),
    )


class Concurrency(msgspec.Struct, frozen=True, kw_only=True):
    """A mean number in flight, and `more`, one standard deviation above it."""

    at: PoissonLoad
    more: int
    seats: int


def concurrency(machine: Replica, point: OperatingPoint, input_cv2: float) -> Concurrency | None:
    """How far the number in flight n spreads: ends come at the rate r(n) of a replica that holds n,
    arrivals at r(batch), so that its variance is r / r'(n) (of a birth and death process, to first
    order; n where r is proportional to it). None where r no longer grows: it is full."""
    at = _open(machine, point, input_cv2)
    wider = math.ceil(math.sqrt(point.batch))
    steeper = _open(machine, msgspec.structs.replace(point, batch=point.batch + wider), input_cv2)
    gained = steeper.rate - at.rate
    if gained <= 1e-6 * at.rate:
        return None
    deviation = math.sqrt(max(at.rate * wider / gained, point.batch))
    return Concurrency(
        at=at,
        more=math.ceil(point.batch + deviation),
        seats=math.ceil(point.batch + 3 * deviation),
    )


def _open(machine: Replica, point: OperatingPoint, input_cv2: float) -> PoissonLoad:
    groups = machine.layout.num_attention
    return load_in_flight(mixed_steps(machine, point), point.osl, groups, point.batch, input_cv2)


def _promised(
    machine: Replica, demand: Demand, slo: Slo, point: OperatingPoint, crowd: Concurrency
) -> tuple[float, float]:
    """TTFT and TPOT at the promise's attainment, the former of the 95th percentile prompt."""
    longest = msgspec.structs.replace(point, isl=max(demand.isl_p95, demand.cached + 1))
    prompt_s = mixed_steps(machine, longest).prompt_s + request_overhead_s(machine)
    decode_s, at = decode_step_s(machine, point), crowd.at
    busier_s = decode_step_s(machine, msgspec.structs.replace(point, batch=crowd.more)) - decode_s
    return (
        at.ttft_quantile(slo.attainment, prompt_s, demand.input_cv2),
        at.tpot_quantile(slo.attainment, busier_s * at.step_s / decode_s),
    )


def _input_share(prompt_s: float, answer_s: float) -> float:
    """Of the bill, what prompts are charged: by the seconds of the device that prompts and decoding
    would take, each alone, whatever stands idle included. What a prompt adds to a decode step would
    be nothing wherever that step waits for memory, and its tokens free."""
    return prompt_s / (prompt_s + answer_s)


def _point(demand: Demand, batch: int, tokens: int) -> OperatingPoint:
    return OperatingPoint(
        model="",
        device="",
        isl=demand.isl,
        osl=demand.osl,
        batch=batch,
        cached=demand.cached,
        max_num_batched_tokens=tokens,
    )


def _per_mtok(dollars_per_hour: float | None, share: float, tok_s: float) -> float | None:
    return None if dollars_per_hour is None else dollars_per_million(dollars_per_hour, tok_s, share)


def _price(device: Accelerator, space: SearchSpace) -> float | None:
    if space.dollars_per_device_hour is not None:
        return space.dollars_per_device_hour
    chosen = quoted_price(device)
    return None if chosen is None else chosen.usd_per_hour


def quoted_price(device: Accelerator) -> Price | None:
    """Of the newest prices the dearest: a plan that turns out too dear is the better surprise."""
    return max(device.prices, key=lambda p: (p.as_of[:7], p.usd_per_hour), default=None)


def _affordable(each: Candidate, space: SearchSpace) -> bool:
    if space.dollars_per_month is None:
        return True
    if each.dollars_per_hour is None:
        return False
    return each.dollars_per_hour * HOURS_PER_MONTH <= space.dollars_per_month


def ranking_key(each: Candidate) -> tuple[float, bool, float, int]:
    """Cheapest first, then those that hold at the interval's end too, by watts, by devices."""
    dollars = math.inf if each.dollars_per_hour is None else each.dollars_per_hour
    watts = math.inf if each.watts is None else each.watts
    return (dollars, not each.sure, watts, each.num_devices)


def _best_of_kind(candidates: Sequence[Candidate]) -> list[Candidate]:
    best: dict[tuple[object, ...], Candidate] = {}
    for each in candidates:
        kind = (each.device, each.layout, each.weight_dtype, each.kv_dtype)
        known = best.get(kind)
        if known is None or ranking_key(each) < ranking_key(known):
            best[kind] = each
    return list(best.values())


def pareto_front(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Those that nobody beats in both tok/s per user and tok/s per device, slowest user first."""
    kept: list[Candidate] = []
    for each in sorted(candidates, key=lambda c: (-c.tok_s_user, -c.tok_s_device)):
        if not kept or each.tok_s_device > kept[-1].tok_s_device:
            kept.append(each)
    return tuple(reversed(kept))
