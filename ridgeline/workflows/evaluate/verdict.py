"""What `ridgeline eval` found: the figures, and the verdict that floor and control allow."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ridgeline.optimize.quality import (
    GateVerdict,
    LengthDrift,
    QualityVerdict,
    ThresholdCheck,
    WindowComparison,
)
from ridgeline.stats import UNBOUNDED, Interval, mean_interval, ratio_interval

_NO_RATIO = Interval(low=0.0, mid=1.0, high=UNBOUNDED)
_WORST: tuple[GateVerdict, ...] = ("fail", "inconclusive", "pass")


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Some of the positions: of one kind of text, or with so many tokens before them.

    `perplexity`: candidate over original.
    """

    num_positions: int
    perplexity: Interval
    kl: Interval
    agreement: Interval


class HarnessScore(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one task: means over documents, and the change, paired. `check`: None where
    the metric does not count right answers, or another of the same task is judged."""

    task: str
    metric: str
    num_docs: int
    before: float
    after: float
    change: Interval
    num_changed: int
    check: ThresholdCheck | None


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is printed. `by_kind`: of text; `by_context`: by tokens read before.

    `refusal`: why there is no verdict on the candidate, where there is none. `harness`: lm-eval's
    tasks, if any were asked for.
    """

    original: str
    candidate_name: str
    floor: QualityVerdict
    candidate: QualityVerdict
    by_kind: dict[str, Part]
    by_context: dict[str, Part]
    lengths: LengthDrift | None
    control: QualityVerdict
    refusal: str | None
    verdict: GateVerdict
    harness: tuple[HarnessScore, ...] = ()


def with_harness(panel: Panel, scores: tuple[HarnessScore, ...]) -> Panel:
    """The panel with lm-eval's tasks: its verdict is the worst of all that was judged."""
    judged = [score.check.verdict for score in scores if score.check is not None]
    worst = next((v for v in _WORST if v in (panel.verdict, *judged)), panel.verdict)
    verdict = panel.verdict if panel.refusal is not None else worst
    return msgspec.structs.replace(panel, harness=scores, verdict=verdict)


def refusal(floor: QualityVerdict, control: QualityVerdict) -> str | None:
    """Why no verdict can be given, where none can."""
    if control.verdict != "fail":
        return "a model with a planted fault was not told from the original"
    if floor.verdict == "fail":
        return "the original does not agree with itself on another number of threads"
    return None


def part_of(found: Sequence[WindowComparison]) -> Part:
    """Means over windows, with their intervals."""
    return Part(
        num_positions=sum(window.count for window in found),
        perplexity=_ratio([(w.nll_after - w.nll_before) / w.count for w in found]),
        kl=_mean([window.kl / window.count for window in found]),
        agreement=_mean([window.same_top / window.count for window in found]),
    )


def _ratio(changes: Sequence[float]) -> Interval:
    return ratio_interval(changes) if len(changes) > 1 else _NO_RATIO


def _mean(values: Sequence[float]) -> Interval:
    return mean_interval(values) if values else Interval(low=0.0, mid=0.0, high=0.0)
