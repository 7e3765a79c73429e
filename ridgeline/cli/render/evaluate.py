"""The console report of `ridgeline eval`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from ridgeline.optimize.quality import (
    Divergence,
    LengthDrift,
    QualityVerdict,
    TaskScore,
    ThresholdCheck,
)
from ridgeline.report.numbers import rounded
from ridgeline.stats import UNBOUNDED, Interval
from ridgeline.workflows.evaluate.evaluate_servers import ServerEvaluation
from ridgeline.workflows.evaluate.evaluation import Evaluation, LmEvalScore, TextSlice

WIDTH = 80  # columns of sentences


def evaluation_text(evaluation: Evaluation) -> str:
    """Every figure with its limit, then the verdict."""
    return "\n".join(_lines(evaluation))


def _lines(evaluation: Evaluation) -> Iterator[str]:
    name, candidate = evaluation.candidate_name, evaluation.candidate
    if evaluation.original == name:
        name += " (with the given settings)"
    yield f"{name} against {evaluation.original}"
    yield ""
    yield f"{'':26}{'candidate, 95 % interval':32}{'limit':>9}  {'floor':>9}  {'control':>9}"
    for check in candidate.checks:
        yield _check_row(check, evaluation)
    others = f"{evaluation.floor.verdict:>9}  {evaluation.control.verdict:>9}"
    yield f"  {'verdict':24}{candidate.verdict:32}{'':9}  {others}"
    yield ""
    yield from _text_lines(candidate)
    yield from _output_lines(candidate.divergence, evaluation.lengths, evaluation.floor.divergence)
    yield from _task_lines(candidate.tasks)
    if evaluation.long_contexts is not None:
        yield from _long_context_lines(evaluation.long_contexts)
    yield from _lm_eval_lines(evaluation.harness)
    yield from _slice_lines("by kind of text", evaluation.by_kind)
    yield from _slice_lines("by tokens of context", evaluation.by_context)
    yield ""
    yield _verdict_line(evaluation)


def _check_row(check: ThresholdCheck, evaluation: Evaluation) -> str:
    mark = {"pass": "✓", "fail": "✗", "inconclusive": "?"}[check.verdict]
    others = [_mid(quality, check.name) for quality in (evaluation.floor, evaluation.control)]
    return (
        f"{mark} {check.name:24}{_interval(check.measured):32}{rounded(check.limit, 4):>9}  "
        f"{others[0]:>9}  {others[1]:>9}"
    )


def _interval(interval: Interval) -> str:
    high = "∞" if interval.high >= UNBOUNDED else rounded(interval.high, 4)
    return f"{rounded(interval.mid, 4)} [{rounded(interval.low, 4)}, {high}]"


def _mid(quality: QualityVerdict, name: str) -> str:
    return next((rounded(c.measured.mid) for c in quality.checks if c.name == name), "–")


def _text_lines(candidate: QualityVerdict) -> Iterator[str]:
    yield (
        f"text      {candidate.num_windows} windows, {candidate.num_positions:,} positions, "
        f"decided after {candidate.num_looks} look(s)"
    )
    before, after = candidate.perplexity_before, candidate.perplexity_after
    if before is not None and after is not None:
        change = after.mid / before.mid - 1
        yield (
            f"          perplexity {before.mid:.3f} → {after.mid:.3f}: {change:+.2%} ± "
            f"{candidate.perplexity_error:.2%} (standard error, paired)"
        )
    share = candidate.num_flips / max(1, candidate.num_positions)
    yield f"          the most likely token changed {candidate.num_flips} times ({share:.2%})"


def _output_lines(
    divergence: Divergence | None, drift: LengthDrift | None, floor: Divergence | None
) -> Iterator[str]:
    if divergence is None or not divergence.num_prompts:
        return
    floor_text = f"; floor: {floor.num_same} of {floor.num_prompts}" if floor else ""
    same = f"{divergence.num_same} of {divergence.num_prompts} greedy outputs are the same"
    yield f"outputs   {same}{floor_text}"
    if divergence.first_token is not None:
        half = "fewer than half diverge"
        if divergence.median_token is not None:
            half = f"half have diverged by token {divergence.median_token}"
        yield f"          the first diverges at token {divergence.first_token}; {half}"
    if drift is not None:
        yield (
            f"          length {drift.mean_before:.1f} → {drift.mean_after:.1f} tokens, change "
            f"{drift.change}; {drift.num_cut} of {drift.num_prompts} reached the limit"
        )


def _task_lines(tasks: Sequence[TaskScore]) -> Iterator[str]:
    for i, task in enumerate(tasks):
        head = "tasks" if i == 0 else ""
        text = f"{head:10}{task.name:11} chance {task.chance:.0%}, right {task.right_before:.1%}"
        if task.right_after is None:
            yield f"{text} of {task.num_items}: the original is too weak to get worse"
        else:
            changed = f"{task.num_flips} of {task.num_items} answers changed"
            yield f"{text} → {task.right_after:.1%}; {changed}"


def _long_context_lines(long: QualityVerdict) -> Iterator[str]:
    """Through the KV cache: every check with its limit, then the scores."""
    yield ""
    looks = (
        f"decided after {long.num_looks} look(s)"
        if long.verdict != "inconclusive"
        else (f"not decided after {long.num_looks} look(s)")
    )
    yield f"long contexts, through the KV cache: {long.verdict}, {looks}"
    for check in long.checks:
        mark = {"pass": "✓", "fail": "✗", "inconclusive": "?"}[check.verdict]
        shown = _interval(check.measured)
        yield f"{mark} {check.name:24}{shown:32}{rounded(check.limit, 4):>9}"
    yield from _task_lines(long.tasks)


def _lm_eval_lines(scores: Sequence[LmEvalScore]) -> Iterator[str]:
    for i, score in enumerate(scores):
        head = "lm-eval" if i == 0 else ""
        judged = "not judged"
        if score.check is not None:
            judged = f"limit {score.check.limit:g}: {score.check.verdict}"
        yield (
            f"{head:10}{score.task}, {score.metric}: {rounded(score.before)} → "
            f"{rounded(score.after)}, {score.num_changed} of {score.num_docs} documents changed"
        )
        yield f"          change {score.change}, {judged}"


def _slice_lines(title: str, slices: dict[str, TextSlice]) -> Iterator[str]:
    if not slices:
        return
    yield ""
    yield f"{title:26}{'KL':29}{'perplexity':24}{'same token':>10}  {'positions':>9}"
    for name, part in slices.items():
        ratio = part.perplexity
        high = "∞" if ratio.high >= UNBOUNDED else f"{ratio.high - 1:+.1%}"
        change = f"{ratio.mid - 1:+.1%} [{ratio.low - 1:+.1%}, {high}]"
        yield (
            f"  {name:24}{_two_digits(part.kl):29}{change:24}{part.agreement.mid:>10.1%}  "
            f"{part.num_positions:>9,}"
        )


def _two_digits(interval: Interval) -> str:
    """Short enough for a column."""
    high = "∞" if interval.high >= UNBOUNDED else rounded(interval.high, 2)
    return f"{rounded(interval.mid, 2)} [{rounded(max(0.0, interval.low), 2)}, {high}]"


def _verdict_line(evaluation: Evaluation) -> str:
    if evaluation.refusal is not None:
        return f"verdict: refused, {evaluation.refusal}"
    if evaluation.verdict == "pass":
        return "verdict: pass"
    lm_eval = [score.check for score in evaluation.harness if score.check is not None]
    long = () if evaluation.long_contexts is None else evaluation.long_contexts.checks
    checks = (*evaluation.candidate.checks, *long, *lm_eval)
    names = [check.name for check in checks if check.verdict == evaluation.verdict]
    return f"verdict: {evaluation.verdict} ({', '.join(names)})"


def server_evaluation_text(evaluation: ServerEvaluation) -> str:
    """Every figure of two servers with its limit and floor, then the verdict."""
    what = [twin or kind for twin, kind in zip(evaluation.twins, evaluation.kinds, strict=True)]
    lines = [
        f"B  {evaluation.b} ({what[1]})",
        f"A  {evaluation.a} ({what[0]})",
        "",
        f"{f'{evaluation.num_texts} texts':32}{'B against A, 95 % interval':28}"
        f"{'limit':>9}  {'floor':>9}",
    ]
    floors = {check.name: rounded(check.measured.mid) for check in evaluation.floor}
    for check in evaluation.checks:
        mark = {"pass": "✓", "fail": "✗", "inconclusive": "?"}[check.verdict]
        floor = floors.get(check.name, "–")
        shown = _interval(check.measured)
        lines.append(f"{mark} {check.name:30}{shown:28}{rounded(check.limit, 4):>9}  {floor:>9}")
    if (greedy := evaluation.greedy) is not None:
        lines += [
            f"  greedy answers: {_interval(greedy.same)} of the tokens before they part",
            f"  (A against itself {rounded(greedy.same_floor.mid)}; {greedy.num_prompts} prompts, "
            f"{greedy.num_near_ties} near ties)",
        ]
    for what_failed, why in evaluation.unmeasured.items():
        text = f"not measured: {what_failed}: {why}"
        lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
    return "\n".join([*lines, "", f"verdict: {evaluation.verdict}"])
