"""Compare each operator of an engine's steps with the bound given by its bytes and FLOPs.

    bound = max(memory bytes / bandwidth, row bytes / bandwidth of a cache, FLOPs / peak)

Memory bytes (weights, keys, values) are read at the bandwidth of a working set as large as
everything that the step reads. Activation rows, which the preceding operator has just written, are
read at the bandwidth of a working set of one layer's rows. The peak is that of the kernel's
multiply-add instructions. All rates are measured in the same run. "% of bound" is bound / time;
values above 100 % mean that the machine's rates changed between the measurements.

The middle half of the measured passes by duration is averaged. Unlike medians of each operator, the
means of the operators still add up to the step.
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
from ridgeline.report.numbers import rounded
from ridgeline.roofline import Peaks, RooflinePoint

OperatorLimit = Literal["bandwidth", "cache", "compute", ""]
HOST = "host"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One operator in one pass (a prompt, or a decode step), summed over all layers.

    `share`: of the time of the pass. `intensity`: FLOPs per byte, None for operators without
    significant arithmetic. `limit`: "" for host work, which has no known bound.
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
        """Time beyond the bound; the whole time if there is no bound."""
        return max(0.0, self.time_s - self.bound_s)


class PhaseTable(msgspec.Struct, frozen=True, kw_only=True):
    """One phase. Its rows, longest first and the host last, add up to `pass_s`.

    `plain_s`: time of a pass without operator timing. `memory_bytes`: weights, keys and values.
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
        """Sum of the bounds of all operators."""
        return sum(row.bound_s for row in self.rows)

    @property
    def host(self) -> Row:
        return self.rows[-1]

    @property
    def timing_cost(self) -> float:
        """Relative increase of the pass time caused by timing the operators."""
        return self.pass_s / self.plain_s - 1


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `ridgeline diagnose MODEL --profile`."""

    target: str
    phases: tuple[PhaseTable, ...]
    ceilings: MeasuredCeilings
    peaks: Peaks
    stands_out: tuple[str, ...]
    points: tuple[RooflinePoint, ...]


def judge(
    target: str, phases: Sequence[PhaseProfile], spec: ModelSpec, ceilings: MeasuredCeilings
) -> Profile:
    """Compare the measured phases of `target` with the bounds of its operators."""
    tables = tuple(table(phase, spec, ceilings) for phase in phases)
    kind = rate_of(spec.layers[0].mlp.gate)
    peaks = ceilings.peaks(kind, max(phase.memory_bytes for phase in tables))
    return Profile(
        target=target,
        phases=tables,
        ceilings=ceilings,
        peaks=peaks,
        stands_out=tuple(line for phase in tables for line in stands_out(phase)),
        points=tuple(point for phase in tables for point in points(phase)),
    )


def middle(passes: Sequence[tuple[StepProfile, ...]]) -> Sequence[tuple[StepProfile, ...]]:
    """The middle half of the passes by duration; all of them if there are fewer than four."""
    ordered = sorted(passes, key=lambda steps: sum(step.time_s for step in steps))
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


def table(phase: PhaseProfile, spec: ModelSpec, ceilings: MeasuredCeilings) -> PhaseTable:
    """The table of a phase. Times and work are means over the same passes."""
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
        if not time_s:  # fused into another operator, such as the gate of a prompt
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
    """Describe a pass."""
    if phase == "prefill":
        tokens = sum(new for step in steps for new, _ in step.shapes)
        return f"a prompt of {tokens:,} tokens" + (f" in {len(steps)} steps" * (len(steps) > 1))
    (shapes,) = (step.shapes for step in steps)
    held = round(fmean(done + new for new, done in shapes))
    return f"{len(shapes)} sequence{'s' * (len(shapes) > 1)} of {held:,} tokens"


def points(phase: PhaseTable) -> tuple[RooflinePoint, ...]:
    """Roofline points of the whole phase and of its arithmetic operators.

    Each operator has the roof of its own kernel, which may use other multiply-add instructions than
    the linear layers.
    """
    whole = (phase.phase, phase.flops, phase.memory_bytes, phase.pass_s, phase.bound_s)
    rows = [(r.title, r.flops, r.nbytes, r.time_s, r.bound_s) for r in phase.rows if r.intensity]
    return tuple(_point(phase, *figures) for figures in (whole, *rows))


def _point(
    phase: PhaseTable, name: str, flops: float, nbytes: float, time_s: float, bound_s: float
) -> RooflinePoint:
    return RooflinePoint(
        name=name,
        phase=phase.phase,
        intensity=flops / nbytes,
        achieved_flops_s=flops / time_s,
        achieved_bytes_s=nbytes / time_s,
        roof_flops_s=flops / bound_s,
        time_s=time_s,
        num_steps=phase.num_passes * phase.steps_per_pass,
    )


MUCH, FAR, COSTLY = 0.10, 0.6, 0.05
"""Share of the pass worth a sentence; share of the bound below which an operator is far from
it; timing overhead that is worth a warning."""


def stands_out(phase: PhaseTable) -> tuple[str, ...]:
    """The most important observations about a phase, as sentences."""
    lines = [_bound_sentence(phase)]
    worst = max(phase.rows[:-1], key=lambda row: row.beyond_s)
    gain = worst.beyond_s / phase.pass_s
    if gain >= MUCH and worst.of_bound is not None:
        lines.append(
            f"{phase.phase}: {worst.title} has the most to gain: "
            f"{rounded(1e3 * worst.beyond_s)} ms beyond its bound, {gain:.0%} of the pass "
            f"(at {worst.of_bound:.0%} of its {worst.limit} bound)"
        )
    far = [r for r in phase.rows[:-1] if r is not worst and _is_far(r)]
    if far:
        named = ", ".join(f"{row.title} ({row.of_bound:.0%})" for row in far)
        lines.append(f"{phase.phase}: also far from their bounds: {named}")
    if phase.host.share >= MUCH:
        lines.append(
            f"{phase.phase}: {phase.host.share:.0%} is spent outside the operators (scheduling, "
            "batch assembly, waking threads, detokenizing); more tokens per step reduce the share"
        )
    if phase.timing_cost >= COSTLY:
        lines.append(
            f"{phase.phase}: timing the operators made a pass {phase.timing_cost:.0%} longer, so "
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
    "cache": "activation rows take more time than weights; fused operators help",
}


def _bound_sentence(phase: PhaseTable) -> str:
    by_limit: defaultdict[str, float] = defaultdict(float)
    for row in phase.rows:
        by_limit[row.limit] += row.bound_s
    limit, bound_s = max(by_limit.items(), key=itemgetter(1))
    return (
        f"{phase.phase} of {phase.what}: {phase.bound_s / phase.pass_s:.0%} of its bound, "
        f"{bound_s / phase.bound_s:.0%} of which is {limit}: {ADVICE[limit]}"
    )
