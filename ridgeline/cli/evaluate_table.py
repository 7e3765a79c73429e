"""The panel of `ridgeline eval` as a page of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ridgeline.cli.panel import HarnessScore, Panel, Part
from ridgeline.optimize.quality import Check, Divergence, LengthDrift, Quality, TaskScore
from ridgeline.optimize.stats import UNBOUNDED, Interval


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


def _row(check: Check, panel: Panel) -> str:
    mark = {"pass": "✓", "fail": "✗", "inconclusive": "?"}[check.verdict]
    others = [_mid(quality, check.name) for quality in (panel.floor, panel.control)]
    return (
        f"{mark} {check.name:24}{_interval(check.found):32}{check.limit:9.4g}  "
        f"{others[0]:>9}  {others[1]:>9}"
    )


def _interval(found: Interval) -> str:
    high = "∞" if found.high >= UNBOUNDED else f"{found.high:.4g}"
    return f"{found.mid:.4g} [{found.low:.4g}, {high}]"


def _mid(quality: Quality, name: str) -> str:
    return next((f"{c.found.mid:.3g}" for c in quality.checks if c.name == name), "–")


def _verdicts(panel: Panel) -> str:
    return f"{panel.floor.verdict:>9}  {panel.control.verdict:>9}"


def _text(found: Quality) -> Iterator[str]:
    yield (
        f"text      {found.num_windows} windows, {found.num_positions:,} positions, decided "
        f"after {found.num_looks} look(s)"
    )
    before, after = found.perplexity_before, found.perplexity_after
    yield f"          perplexity {before.mid:.3f} → {after.mid:.3f} (unpaired: {before})"
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
            f"{head:10}{score.task}, {score.metric}: {score.before:.3g} → {score.after:.3g}; "
            f"change {score.change}, {told}; {score.num_changed} of {score.num_docs} documents "
            "changed"
        )


def _parts(title: str, parts: dict[str, Part]) -> Iterator[str]:
    if not parts:
        return
    yield f"{title}:"
    for name, part in parts.items():
        yield (
            f"  {name:12} KL {part.kl.mid:.2g}, same likeliest token {part.agreement.mid:.1%} "
            f"({part.num_positions:,} positions)"
        )


def _end(panel: Panel) -> Iterator[str]:
    if panel.refusal is not None:
        yield f"verdict: refused, {panel.refusal}"
        return
    asked = [score.check for score in panel.harness if score.check is not None]
    checks = (*panel.candidate.checks, *asked)
    bad = [check.name for check in checks if check.verdict == panel.verdict]
    because = f" ({', '.join(bad)})" if panel.verdict != "pass" else ""
    yield f"verdict: {panel.verdict}{because}"
