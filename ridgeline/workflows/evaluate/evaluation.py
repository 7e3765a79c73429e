"""The result of an evaluation: figures, and the verdict that the floor and the control allow."""

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
from ridgeline.optimize.quality.thresholds import worst_verdict
from ridgeline.report.result import Result
from ridgeline.stats import UNBOUNDED, Interval, mean_interval, ratio_interval

_NO_RATIO = Interval(low=0.0, mid=1.0, high=UNBOUNDED)


class TextSlice(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison on some of the positions: one kind of text, or one range of context lengths.

    `perplexity`: candidate over original.
    """

    num_positions: int
    perplexity: Interval
    kl: Interval
    agreement: Interval


class LmEvalScore(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one lm-eval task: means over documents, and the change, paired by document.

    `check` is None if the metric does not count right answers, or another metric of the same task
    is judged.
    """

    task: str
    metric: str
    num_docs: int
    before: float
    after: float
    change: Interval
    num_changed: int
    check: ThresholdCheck | None


class Evaluation(Result, frozen=True, kw_only=True):
    """The candidate against the original.

    `floor`: the original against itself on another number of threads, which is what rounding alone
    does. `control`: the original with a planted fault, which must fail. `long_contexts`: facts in
    long contexts, where the KV caches differ. `refusal`: why there is no verdict, if there is none.
    `harness`: scores of lm-eval's tasks, if any were run.
    """

    original: str
    candidate_name: str
    floor: QualityVerdict
    candidate: QualityVerdict
    by_kind: dict[str, TextSlice]
    by_context: dict[str, TextSlice]
    lengths: LengthDrift | None
    control: QualityVerdict
    refusal: str | None
    verdict: GateVerdict
    long_contexts: QualityVerdict | None = None
    harness: tuple[LmEvalScore, ...] = ()


def with_lm_eval(evaluation: Evaluation, scores: tuple[LmEvalScore, ...]) -> Evaluation:
    """The evaluation with lm-eval's scores; its verdict is the worst of all."""
    verdicts = [score.check.verdict for score in scores if score.check is not None]
    worst = worst_verdict((evaluation.verdict, *verdicts))
    verdict = evaluation.verdict if evaluation.refusal is not None else worst
    return msgspec.structs.replace(evaluation, harness=scores, verdict=verdict)


def refusal_reason(floor: QualityVerdict, control: QualityVerdict) -> str | None:
    """Why no verdict can be given; None if one can."""
    if control.verdict != "fail":
        return "a model with a planted fault could not be distinguished from the original"
    if floor.verdict == "fail":
        return "the original does not agree with itself on another number of threads"
    return None


def text_slice(windows: Sequence[WindowComparison]) -> TextSlice:
    """Means over windows, with their intervals."""
    return TextSlice(
        num_positions=sum(window.count for window in windows),
        perplexity=_ratio([(w.nll_after - w.nll_before) / w.count for w in windows]),
        kl=_mean([window.kl / window.count for window in windows]),
        agreement=_mean([window.same_top / window.count for window in windows]),
    )


def _ratio(changes: Sequence[float]) -> Interval:
    return ratio_interval(changes) if len(changes) > 1 else _NO_RATIO


def _mean(values: Sequence[float]) -> Interval:
    return mean_interval(values) if values else Interval(low=0.0, mid=0.0, high=0.0)
