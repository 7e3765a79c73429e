"""The verdict on a run: what bounds it, in one sentence with its evidence.

The order of the cases matters. If the client is at its limit, every other number describes the
client; if the KV cache is too small, the engine does work twice; if requests queue, faster steps
would not remove the wait at once. Only then does it matter which side of the roofline the steps are
on.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ridgeline.diagnose.conditions import Condition, Facts, Value, all_hold, fill, parse
from ridgeline.roofline import Peaks, RooflinePoint

Bound = Literal[
    "client", "capacity", "queue", "idle", "bandwidth", "compute", "overhead", "planning", "unknown"
]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A bound, a sentence that explains it, and the facts it is based on."""

    bound: Bound
    sentence: str
    evidence: dict[str, Value]


class _Case(msgspec.Struct, frozen=True, kw_only=True):
    bound: Bound
    when: tuple[Condition, ...]
    sentence: str
    evidence: tuple[str, ...]


def _case(bound: Bound, when: tuple[str, ...], sentence: str, evidence: tuple[str, ...]) -> _Case:
    return _Case(bound=bound, when=tuple(map(parse, when)), sentence=sentence, evidence=evidence)


_OUTSIDE_THE_STEP = (
    _case(
        "client",
        ("client_cpu_share > 0.9", "send_lag_p95_s > 0.05"),
        "Client-bound: the load client used {client_cpu_share} of a core and sent its requests "
        "{send_lag_p95_s} late (p95), so the figures describe the client, not the server.",
        ("client_cpu_share", "send_lag_p95_s"),
    ),
    _case(
        "capacity",
        ("preemptions > 0.05 * num_requests",),
        "Capacity-bound: {preemptions} sequences were preempted and computed again, "
        "with {kv_used_share} of the KV cache in use (p95).",
        ("preemptions", "kv_used_share", "num_requests"),
    ),
    _case(
        "capacity",
        ("kv_used_share > 0.95", "waiting_time_share > 0.3"),
        "Capacity-bound: the KV cache is {kv_used_share} full (p95) and requests wait for blocks "
        "during {waiting_time_share} of the busy time.",
        ("kv_used_share", "waiting_time_share"),
    ),
    _case(
        "queue",
        ("waiting_time_share > 0.4", "queue_of_ttft_share > 0.5"),
        "Queue-bound: {queue_of_ttft_share} of the time to first token is waiting for a slot "
        "(p95 {queue_p95_s}), with {mean_running} of {max_num_seqs} slots taken on average.",
        ("queue_of_ttft_share", "queue_p95_s", "mean_running", "max_num_seqs"),
    ),
    _case(
        "idle",
        ("idle_share > 0.6",),
        "Not bound at this load: the engine was idle {idle_share} of the time, so its throughput "
        "is limited by the arrivals.",
        ("idle_share",),
    ),
)

_INSIDE_THE_STEP: dict[Bound, str] = {
    "bandwidth": "Bandwidth-bound: {bandwidth_share} of the time is needed to read the bytes of "
    "each step at this machine's bandwidth (MBU {mbu_share}, MFU {mfu_share}).",
    "compute": "Compute-bound: {compute_share} of the time is needed for the arithmetic at this "
    "machine's peak (MFU {mfu_share}, MBU {mbu_share}).",
    "overhead": "Overhead-bound: {overhead_share} of the time is explained by neither bytes nor "
    "arithmetic (MBU {mbu_share}, MFU {mfu_share}): dispatch, host work, slow kernels.",
    "planning": "Planning-bound: {planning_share} of the time goes into planning steps, not "
    "computing them.",
}


def verdict(facts: Facts) -> Finding:
    """The bound of a run, from the facts of `ridgeline.diagnose.facts.facts_of`."""
    for case in _OUTSIDE_THE_STEP:
        if all_hold(case.when, facts):
            return _finding(case.bound, case.sentence, case.evidence, facts)
    known = {bound: _share(facts, bound) for bound in _INSIDE_THE_STEP}
    if not any(known.values()):
        return Finding(
            bound="unknown",
            sentence="The bound is unknown: this server reports nothing about its steps.",
            evidence={},
        )
    largest = max(known, key=lambda bound: known[bound])
    evidence = (
        *(f"{bound}_share" for bound in _INSIDE_THE_STEP),
        "idle_share",
        "mbu_share",
        "mfu_share",
    )
    return _finding(largest, _INSIDE_THE_STEP[largest], evidence, facts)


def verdict_of_point(point: RooflinePoint, peaks: Peaks) -> Finding:
    """The bound of one phase: its side of the ridge, or overhead below half of its roof."""
    side: Bound = "bandwidth" if point.intensity < peaks.ridge else "compute"
    bound: Bound = side if point.share_of_roof >= 0.5 else "overhead"
    sentence = (
        f"{point.phase}: {point.intensity:.3g} FLOP/byte ({side} side; "
        f"ridge at {peaks.ridge:.3g}), {point.achieved_flops_s / 1e9:.3g} GFLOP/s = "
        f"{100 * point.share_of_roof:.0f}% of its roof"
    )
    if bound == "overhead":
        sentence += ", so the rest is overhead"
    evidence: dict[str, Value] = {
        "intensity": point.intensity,
        "achieved_flops_s": point.achieved_flops_s,
        "roof_flops_s": point.roof_flops_s,
    }
    return Finding(bound=bound, sentence=sentence + ".", evidence=evidence)


def _finding(bound: Bound, sentence: str, evidence: tuple[str, ...], facts: Facts) -> Finding:
    return Finding(
        bound=bound,
        sentence=fill(sentence, facts),
        evidence={name: facts[name] for name in evidence if name in facts},
    )


def _share(facts: Facts, bound: Bound) -> float:
    value = facts.get(f"{bound}_share")
    return float(value) if isinstance(value, int | float) else 0.0
