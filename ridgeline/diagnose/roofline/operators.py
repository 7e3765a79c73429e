"""Each operator of an engine's steps against the bound of its own bytes and FLOPs.

    bound = max(memory bytes / bandwidth, row bytes / bandwidth of a cache, FLOPs / peak)

Memory bytes (weights, keys, values) are read at the rate of a working set as large as all that the
step reads; rows, which the operator before has just made, at the rate of a working set of one
layer's rows. The peak is that of the kernel's kind of multiply-add. All rates are measured in the
same run. "% of bound" is bound / time; above 100 % the machine's rates moved in between.

Of the measured passes the middle half by duration is averaged: a sum of parts, unlike a median of
each, still adds up to the step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from operator import itemgetter
from statistics import fmean, median
from typing import Literal

import msgspec

from ridgeline.hardware.ceilings import MeasuredCeilings
from ridgeline.modelspec.cost.operators import (
    OperatorWork,
    describe_operator,
    operator_work,
    rate_of,
    total_work,
    work_of,
)
from ridgeline.modelspec.model import ModelSpec
from ridgeline.records import PhaseProfile, ProfiledPhase, StepProfile
from ridgeline.roofline import Peaks, RooflinePoint

OperatorLimit = Literal["bandwidth", "cache", "compute", ""]
HOST = "host"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One operator in one pass (a prompt, or a decode step), all layers together.

    `share` of the pass. `intensity`: FLOPs per byte, None where it multiplies next to nothing.
    `limit` "": nothing is known to bound it (what the host does).
    """

    operator: str
    title: str
    calls: int
    time_s: float
    share: float
    flops: float = 0.0
    nbytes: float = 0.0
    intensity: float | None = None
    limit: OperatorLimit = ""
    bound_s: float = 0.0

    @property
    def of_bound(self) -> float | None:
        return self.bound_s / self.time_s if self.limit and self.time_s > 0 else None

    @property
    def beyond_s(self) -> float:
        """What it takes beyond its bound; all of it where nothing bounds it."""
        return max(0.0, self.time_s - self.bound_s)


class PhaseTable(msgspec.Struct, frozen=True, kw_only=True):
    """One phase: its rows, the longest first and the host last, add up to `pass_s`.

    `plain_s`: a pass without timed operators. `memory_bytes`: of weights, keys and values.
    """

    phase: ProfiledPhase
    what: str
    num_passes: int
    steps_per_pass: int
    pass_s: float
    plain_s: float
    flops: float
    memory_bytes: float
    rows: tuple[Row, ...]

    @property
    def bound_s(self) -> float:
        """Of all operators, one after another."""
        return sum(row.bound_s for row in self.rows)

    @property
    def host(self) -> Row:
        return self.rows[-1]

    @property
    def timing_cost(self) -> float:
        """What timing the operators adds to a pass, as a share."""
        return self.pass_s / self.plain_s - 1


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What `ridgeline diagnose MODEL --profile` found."""

    target: str
    phases: tuple[PhaseTable, ...]
    ceilings: MeasuredCeilings
    peaks: Peaks
    stands_out: tuple[str, ...]
    points: tuple[RooflinePoint, ...]


def judge(
    target: str, phases: Sequence[PhaseProfile], spec: ModelSpec, ceilings: MeasuredCeilings
) -> Profile:
    tables = tuple(table(phase, spec, ceilings) for phase in phases)
    kind = rate_of(spec.layers[0].mlp.gate)
    peaks = ceilings.peaks(kind, max(each.memory_bytes for each in tables))
    return Profile(
        target=target,
        phases=tables,
        ceilings=ceilings,
        peaks=peaks,
        stands_out=tuple(line for each in tables for line in stands_out(each)),
        points=tuple(point for each in tables for point in points(each)),
    )


def middle(passes: Sequence[tuple[StepProfile, ...]]) -> Sequence[tuple[StepProfile, ...]]:
    """The middle half by duration; all where there are fewer than four."""
    ordered = sorted(passes, key=lambda steps: sum(step.time_s for step in steps))
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


def table(phase: PhaseProfile, spec: ModelSpec, ceilings: MeasuredCeilings) -> PhaseTable:
    """Times are means of the chosen passes; work is that of the very same steps."""
    chosen = middle(phase.passes)
    steps = [step for steps in chosen for step in steps]
    count = len(chosen)
    pass_s = sum(step.time_s for step in steps) / count
    per_step = [operator_work(spec, step.shapes, step.num_sampled) for step in steps]
    whole = total_work(work for parts in per_step for work in parts.values()).scaled(1 / count)
    names = dict.fromkeys(name for step in steps for name in step.operators)
    memory_rate = ceilings.bandwidth(whole.memory_bytes * count / len(steps))
    rows = []
    for name in names:
        work = total_work(work_of(name, parts) for parts in per_step).scaled(1 / count)
        calls = sum(step.operators[name].calls for step in steps if name in step.operators)
        time_s = sum(step.operators[name].time_s for step in steps if name in step.operators)
        if not time_s:  # done within another: a prompt's gate, by whoever multiplied
            continue
        taken = (round(calls / count), time_s / count, pass_s)
        rows.append(_row(name, taken, work, ceilings, memory_rate))
    host_s = sum(step.host_s for step in steps) / count
    host = Row(operator=HOST, title="host", calls=1, time_s=host_s, share=host_s / pass_s)
    return PhaseTable(
        phase=phase.phase,
        what=_what(phase.phase, chosen[len(chosen) // 2]),
        num_passes=len(phase.passes),
        steps_per_pass=round(len(steps) / count),
        pass_s=pass_s,
        plain_s=median(phase.plain_s),
        flops=whole.flops,
        memory_bytes=whole.memory_bytes,
        rows=(*sorted(rows, key=lambda row: -row.time_s), host),
    )


def _row(
    name: str,
    taken: tuple[int, float, float],
    work: OperatorWork,
    ceilings: MeasuredCeilings,
    memory_rate: float,
) -> Row:
    calls, time_s, pass_s = taken
    bounds: dict[OperatorLimit, float] = {
        "bandwidth": work.memory_bytes / memory_rate,
        "cache": work.row_bytes / ceilings.bandwidth(work.row_bytes / max(1, calls)),
        "compute": work.flops / ceilings.flops_s.get(work.rate, math.inf),
    }
    limit = max(bounds, key=bounds.__getitem__)
    nbytes = work.memory_bytes + work.row_bytes
    return Row(
        operator=name,
        title=describe_operator(name),
        calls=calls,
        time_s=time_s,
        share=time_s / pass_s,
        flops=work.flops,
        nbytes=nbytes,
        intensity=work.flops / nbytes if work.flops and nbytes else None,
        limit=limit if bounds[limit] > 0 else "",
        bound_s=bounds[limit],
    )


def _what(phase: ProfiledPhase, steps: Sequence[StepProfile]) -> str:
    """The pass in words."""
    if phase == "prefill":
        tokens = sum(new for step in steps for new, _ in step.shapes)
        return f"a prompt of {tokens:,} tokens" + (f" in {len(steps)} steps" * (len(steps) > 1))
    (shapes,) = (step.shapes for step in steps)
    held = round(fmean(done + new for new, done in shapes))
    return f"{len(shapes)} sequence{'s' * (len(shapes) > 1)} of {held:,} tokens"


def points(found: PhaseTable) -> tuple[RooflinePoint, ...]:
    """The phase as a whole, then its operators that multiply, each under the roof of its own bound
    (its kernel's kind of multiply-add, which may not be the layers')."""
    whole = (found.phase, found.flops, found.memory_bytes, found.pass_s, found.bound_s)
    rows = [(r.title, r.flops, r.nbytes, r.time_s, r.bound_s) for r in found.rows if r.intensity]
    return tuple(_point(found, *each) for each in (whole, *rows))


def _point(
    found: PhaseTable, name: str, flops: float, nbytes: float, time_s: float, bound_s: float
) -> RooflinePoint:
    return RooflinePoint(
        name=name,
        phase=found.phase,
        intensity=flops / nbytes,
        achieved_flops_s=flops / time_s,
        achieved_bytes_s=nbytes / time_s,
        roof_flops_s=flops / bound_s,
        time_s=time_s,
        num_steps=found.num_passes * found.steps_per_pass,
    )


MUCH, FAR, COSTLY = 0.10, 0.6, 0.05
"""A share of the pass worth a sentence; a share of the bound that is far from it; a share of the
pass from which timing it is said to have changed it."""


def stands_out(found: PhaseTable) -> tuple[str, ...]:
    """What a reader should see first, as sentences."""
    lines = [_bound_sentence(found)]
    worst = max(found.rows[:-1], key=lambda row: row.beyond_s)
    gain = worst.beyond_s / found.pass_s
    if gain >= MUCH and worst.of_bound is not None:
        lines.append(
            f"{found.phase}: most lies in {worst.title}: {1e3 * worst.beyond_s:.3g} ms beyond its "
            f"bound, {gain:.0%} of the pass ({worst.of_bound:.0%} of its {worst.limit} bound)"
        )
    far = [r for r in found.rows[:-1] if r is not worst and _is_far(r)]
    if far:
        named = ", ".join(f"{row.title} ({row.of_bound:.0%})" for row in far)
        lines.append(f"{found.phase}: also far from their bounds: {named}")
    if found.host.share >= MUCH:
        lines.append(
            f"{found.phase}: {found.host.share:.0%} is spent outside the operators (scheduler, "
            "batch, threads that wake, texts): more tokens per step share it"
        )
    if found.timing_cost >= COSTLY:
        lines.append(
            f"{found.phase}: timing the operators made a pass {found.timing_cost:.0%} longer: "
            "trust the shares more than the milliseconds"
        )
    return tuple(lines)


def _is_far(row: Row) -> bool:
    return row.of_bound is not None and row.of_bound < FAR and row.share >= MUCH / 2


ADVICE = {
    "bandwidth": "fewer bytes (--quantization, --kv-cache-dtype) or more sequences per step help; "
    "faster arithmetic does not",
    "compute": "faster arithmetic (fewer bits, more cores) or less of it (a cached prefix) "
    "helps; more bandwidth does not",
    "cache": "its rows, not its weights, weigh most: fused operators help",
}


def _bound_sentence(found: PhaseTable) -> str:
    by_limit: defaultdict[str, float] = defaultdict(float)
    for row in found.rows:
        by_limit[row.limit] += row.bound_s
    limit, bound_s = max(by_limit.items(), key=itemgetter(1))
    return (
        f"{found.phase} of {found.what}: {found.bound_s / found.pass_s:.0%} of its bound, "
        f"{bound_s / found.bound_s:.0%} of which is {limit}: {ADVICE[limit]}"
    )
