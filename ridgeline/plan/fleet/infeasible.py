"""Explains why no fleet meets an SLO, by comparing it with the roofline bounds of the devices.

The floor of a layout is the time of a single request at the full peaks without overhead. If even
the lowest floor of all layouts exceeds the SLO, the error names the physical bound with its
arithmetic. If only the predictions exceed it, the error names overhead, communication, memory,
queues or the budget as the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ridgeline.errors import CannotRun
from ridgeline.hardware.catalogue import Accelerator
from ridgeline.modelspec.model import ModelSpec
from ridgeline.plan.fleet.demand import Demand
from ridgeline.plan.fleet.search import (
    HOURS_PER_MONTH,
    Candidate,
    SearchResult,
    SearchSpace,
    enumerate_replicas,
)
from ridgeline.plan.step_time.replica import Replica, StepCost
from ridgeline.records import Slo
from ridgeline.report.numbers import rounded
from ridgeline.roofline import bound


class LatencyFloor(msgspec.Struct, frozen=True, kw_only=True):
    """The minimum seconds on one layout, and the resource that bounds them."""

    where: str
    seconds: float
    why: str


def _floor(machine: Replica, cost: StepCost, what: str) -> LatencyFloor:
    least = bound(cost, machine.peaks)
    device, n = machine.device, machine.layout.num_devices
    if least.limit == "bandwidth":
        limit = f"{rounded(cost.bytes / 1e9)} GB per device at "
        limit += f"{rounded(device.bandwidth_bytes_s / 1e12)} TB/s (memory bandwidth)"
    else:
        peak = machine.peaks.flops_s / 1e12
        limit = f"{rounded(cost.flops / 1e12)} TFLOP per device at {rounded(peak, 4)} TFLOP/s"
        limit += f" dense {machine.compute_dtype} (compute)"
    where = f"{n} x {device.name} ({machine.layout}, {machine.weight_dtype})"
    return LatencyFloor(where=where, seconds=least.seconds, why=f"{what} takes {limit}")


def tpot_floor(machine: Replica, demand: Demand) -> LatencyFloor:
    """The floor of TPOT: one decode step of a single request."""
    cost = machine.uniform(1, 1, demand.isl + demand.osl // 2, sampled=1)
    return _floor(machine, cost, "one token")


def ttft_floor(machine: Replica, demand: Demand) -> LatencyFloor:
    """The floor of TTFT: one mean prompt in one step."""
    cost = machine.uniform(1, demand.isl - demand.found, demand.found, sampled=1)
    return _floor(machine, cost, f"a prompt of {demand.isl} tokens")


def explain_infeasible(
    spec: ModelSpec,
    demand: Demand,
    slo: Slo,
    space: SearchSpace,
    catalogue: Mapping[str, Accelerator],
    result: SearchResult,
) -> CannotRun:
    """The error to raise if `search` returned no fleet."""
    known = list(enumerate_replicas(spec, space, catalogue, {}))
    if not known or not result.num_candidates:
        return _no_memory(spec, known, result)
    tpot = min((tpot_floor(m, demand) for m in known), key=lambda f: f.seconds)
    ttft = min((ttft_floor(m, demand) for m in known), key=lambda f: f.seconds)
    for name, floor, limit in (("TPOT", tpot, slo.tpot_s), ("TTFT", ttft, slo.ttft_s)):
        if limit is not None and floor.seconds > limit:
            return _physics(name, floor, limit)
    e2e = ttft.seconds + (demand.osl - 1) * tpot.seconds
    if slo.e2e_s is not None and e2e > slo.e2e_s:
        return _physics(
            f"e2e of {demand.osl} tokens", msgspec.structs.replace(tpot, seconds=e2e), slo.e2e_s
        )
    return _not_physics(slo, space, result)


def _physics(name: str, floor: LatencyFloor, limit_s: float) -> CannotRun:
    return CannotRun(
        f"no device of this plan can meet the SLO: {floor.why}",
        value=f"{name} {limit_s * 1000:g} ms",
        limit=f"at least {rounded(floor.seconds * 1000)} ms even on {floor.where}",
        fix="relax the SLO, or use a smaller model, fewer bits (--quantization) or more devices",
    )


def _no_memory(spec: ModelSpec, known: Sequence[Replica], result: SearchResult) -> CannotRun:
    reason = next(iter(result.left_out.values()), "")
    least = min((m.resident_bytes for m in known), default=0.0)
    value = f"{least / 1e9:.1f} GB of weights per device at least" if known else reason
    return CannotRun(
        f"no layout of {spec.name} fits the memory of these devices (memory capacity)",
        value=value,
        fix="use more devices per replica (--max-devices), fewer bits, or larger devices",
    )


def _not_physics(slo: Slo, space: SearchSpace, result: SearchResult) -> CannotRun:
    """The peaks allow the SLO, but no candidate is predicted to meet it within the budget."""
    if result.over_budget is not None:
        return _over_budget(result.over_budget, space)
    fastest = max(result.front, key=lambda c: c.tok_s_user)
    return CannotRun(
        "no candidate is predicted to meet the SLO, although the devices' peaks would allow it: "
        "overhead per step, communication and queues take the rest",
        value=str(slo),
        limit=(
            f"the fastest is {fastest.layout} on {fastest.device}: "
            f"TPOT {rounded(fastest.tpot_s * 1000)} ms, TTFT {rounded(fastest.ttft_s * 1000)} ms"
        ),
        fix="relax the SLO, or use fewer bits",
    )


def _over_budget(cheapest: Candidate, space: SearchSpace) -> CannotRun:
    dollars = cheapest.dollars_per_hour
    costs = "no price is known" if dollars is None else f"${dollars * HOURS_PER_MONTH:,.0f} a month"
    kind = f"{cheapest.num_replicas} x {cheapest.device} {cheapest.layout}"
    return CannotRun(
        "every fleet that meets the SLO exceeds the budget",
        value=f"the cheapest, {kind}: {costs}",
        limit=f"${space.dollars_per_month or 0:,.0f} a month",
        fix="raise --budget, relax the SLO (--slo), or use cheaper devices (--price-per-hour)",
    )
