"""The panel of `ridgeline eval` as a page of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ridgeline.optimize.quality import (
    Divergence,
    LengthDrift,
    QualityVerdict,
    TaskScore,
    ThresholdCheck,
)
from ridgeline.stats import UNBOUNDED, Interval
from ridgeline.workflows.evaluate.verdict import HarnessScore, Panel, Part


def show(panel: Panel) -> str:
    """Every figure beside its limit, then the verdict."""
    return "\n".join(_lines(panel))


def _lines(panel: Panel) -> Iterator[str]:
    same = panel.original == panel.candidate_name
    name = f"{panel.candidate_name} (as asked)" if same else panel.candidate_name
    found = panel.candidate
    yield f"{name} against {panel.original}"
    yield ""
    yield f"{'':26}{'candidate, 95 % interval':32}{'limit':>9}  {'floor':>9}  {'control':>9}"
    for check in found.checks:
        yield _row(check, panel)
    yield f"  {'verdict':24}{found.verdict:32}{'':9}  {_verdicts(panel)}"
    yield ""
    yield from _text(found)
    yield from _answers(found.divergence, panel.lengths, panel.floor.divergence)
    yield from _tasks(found.tasks)
    yield from _harness(panel.harness)
    yield from _parts("by kind of text", panel.by_kind)
    yield from _parts("by tokens of context", panel.by_context)
    yield ""
    yield from _end(panel)


def _row(check: ThresholdCheck, panel: Panel) -> str:
    mark = {"pass": "✓", "fail": "✗", "inconclusive": "?"}[check.verdict]
    others = [_mid(quality, check.name) for quality in (panel.floor, panel.control)]
    return (
        f"{mark} {check.name:24}{_interval(check.measured):32}{check.limit:9.4g}  "
        f"{others[0]:>9}  {others[1]:>9}"
    )


def _interval(found: Interval) -> str:
    high = "∞" if found.high >= UNBOUNDED else f"{found.high:.4g}"
    return f"{found.mid:.4g} [{found.low:.4g}, {high}]"


def _mid(quality: QualityVerdict, name: str) -> str:
    return next((f"{c.measured.mid:.3g}" for c in quality.checks if c.name == name), "–")


def _verdicts(panel: Panel) -> str:
    return f"{panel.floor.verdict:>9}  {panel.control.verdict:>9}"


def _text(found: QualityVerdict) -> Iterator[str]:
    yield (
        f"text      {found.num_windows} windows, {found.num_positions:,} positions, decided "
        f"after {found.num_looks} look(s)"
    )
    before, after = found.perplexity_before, found.perplexity_after
    change = after.mid / before.mid - 1
    yield (
        f"          perplexity {before.mid:.3f} → {after.mid:.3f}: {change:+.2%} ± "
        f"{found.perplexity_error:.2%} (standard error, paired)"
    )
    share = found.num_flips / max(1, found.num_positions)
    yield f"          {found.num_flips} likeliest tokens changed ({share:.2%})"


def _answers(
    parting: Divergence | None, drift: LengthDrift | None, floor: Divergence | None
) -> Iterator[str]:
    if parting is None or not parting.num_prompts:
        return
    own = f"; floor: {floor.num_same} of {floor.num_prompts}" if floor else ""
    yield f"answers   {parting.num_same} of {parting.num_prompts} greedy answers the same{own}"
    if parting.first_token is not None:
        half = "more than half never part" if parting.median_token is None else ""
        half = half or f"half have parted by token {parting.median_token}"
        yield f"          the first parts at token {parting.first_token}; {half}"
    if drift is not None:
        yield (
            f"          length {drift.mean_before:.1f} → {drift.mean_after:.1f} tokens, change "
            f"{drift.change}; {drift.num_cut} of {drift.num_prompts} reached the limit"
        )


def _tasks(tasks: Sequence[TaskScore]) -> Iterator[str]:
    for place, task in enumerate(tasks):
        head = "tasks" if place == 0 else ""
        told = f"{head:10}{task.name:11} chance {task.chance:.0%}, right {task.right_before:.1%}"
        if task.right_after is None:
            yield f"{told} of {task.num_items}: the original is too weak to lose anything"
        else:
            yield (
                f"{told} → {task.right_after:.1%}; "
                f"{task.num_flips} of {task.num_items} answers changed"
            )


def _harness(scores: Sequence[HarnessScore]) -> Iterator[str]:
    for place, score in enumerate(scores):
        head = "lm-eval" if place == 0 else ""
        told = "not judged"
        if score.check is not None:
            told = f"limit {score.check.limit:g}: {score.check.verdict}"
        yield (
            f"{head:10}{score.task}, {score.metric}: {score.before:.3g} → {score.after:.3g}, "
            f"{score.num_changed} of {score.num_docs} documents changed"
        )
        yield f"          change {score.change}, {told}"


def _parts(title: str, parts: dict[str, Part]) -> Iterator[str]:
    if not parts:
        return
    yield ""
    yield f"{title:26}{'KL':29}{'perplexity':24}{'same token':>10}  {'positions':>9}"
    for name, part in parts.items():
        ratio = part.perplexity
        change = f"{ratio.mid - 1:+.1%} [{ratio.low - 1:+.1%}, {_high(ratio)}]"
        yield (
            f"  {name:24}{_two(part.kl):29}{change:24}{part.agreement.mid:>10.1%}  "
            f"{part.num_positions:>9,}"
        )


def _two(found: Interval) -> str:
    """Two digits, which hold a column."""
    high = "∞" if found.high >= UNBOUNDED else f"{found.high:.2g}"
    return f"{found.mid:.2g} [{max(0.0, found.low):.2g}, {high}]"


def _high(ratio: Interval) -> str:
    return "∞" if ratio.high >= UNBOUNDED else f"{ratio.high - 1:+.1%}"


def _end(panel: Panel) -> Iterator[str]:
    if panel.refusal is not None:
        yield f"verdict: refused, {panel.refusal}"
        return
    asked = [score.check for score in panel.harness if score.check is not None]
    checks = (*panel.candidate.checks, *asked)
    bad = [check.name for check in checks if check.verdict == panel.verdict]
    because = f" ({', '.join(bad)})" if panel.verdict != "pass" else ""
    yield f"verdict: {panel.verdict}{because}"
