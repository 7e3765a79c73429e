"""The user's own evaluation as a quality gate: scores of a candidate against the baseline's.

Evaluations are noisy (sampling, batching, a judge model), so the baseline is scored several times
and its spread is part of the verdict. A score is a number, more is better; an evaluation that
prints none scores 1 when it succeeds. None stands for a run that failed.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence

from ridgeline.errors import DECODE_ERRORS, CannotRun
from ridgeline.optimize.quality.thresholds import ThresholdCheck, check_min
from ridgeline.stats import UNBOUNDED, Interval, difference_interval

REPEATS = 3
"""Runs of the evaluation on each configuration."""

Score = float | None
Evaluate = Callable[[], Awaitable[Score]]


def printed_score(output: str) -> float:
    """The number in the last line, or its JSON's "score"; 1 without either."""
    lines = output.strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else None
    except DECODE_ERRORS:
        return 1.0
    score = value.get("score") if isinstance(value, dict) else value
    return float(score) if isinstance(score, int | float) and not isinstance(score, bool) else 1.0


def judge_scores(before: Sequence[float], after: Sequence[Score], margin: float) -> ThresholdCheck:
    """The change of the score, which may drop by `margin`.

    Fails if every run on the candidate failed, and is inconclusive if some did, or if there are too
    few runs for an interval.
    """
    name = f"--eval-cmd, change (margin {margin:g})"
    scores = [score for score in after if score is not None]
    if after and not scores:
        lost = Interval(low=-1.0, mid=-1.0, high=-1.0)
        return ThresholdCheck(name=name, measured=lost, limit=-margin, verdict="fail")
    if len(scores) < len(after) or not scores or len(before) + len(scores) < 3:
        unknown = Interval(low=-UNBOUNDED, mid=0.0, high=UNBOUNDED)
        return ThresholdCheck(name=name, measured=unknown, limit=-margin, verdict="inconclusive")
    return check_min(name, difference_interval(before, scores), -margin)


class UserGate:
    """Compares candidates with the baseline by the user's evaluation. `clock`: seconds."""

    def __init__(self, margin: float, clock: Callable[[], float]) -> None:
        self._margin, self._clock = margin, clock
        self._before: list[float] = []
        self._run_s = 0.0

    @property
    def scores(self) -> tuple[float, ...]:
        """The baseline's scores so far."""
        return tuple(self._before)

    def restore(self, scores: Sequence[float]) -> None:
        """Take over the scores of an interrupted search."""
        self._before = list(scores)

    async def score_baseline(self, evaluate: Evaluate, repeats: int) -> None:
        """Complete the baseline's scores to `repeats`. Raises CannotRun if a run fails."""
        while len(self._before) < repeats:
            score = await self._timed(evaluate)
            if score is None:
                raise CannotRun(
                    "--eval-cmd fails on the baseline, so it cannot judge a change",
                    value=f"run {len(self._before) + 1} of {REPEATS}",
                    fix="run it by hand against the server, and give it a score if it is noisy",
                )
            self._before.append(score)

    async def check(self, evaluate: Evaluate, spare_s: float) -> ThresholdCheck:
        """Score a candidate as often as fits `spare_s`, at most `REPEATS` times."""
        runs = min(REPEATS, int(spare_s / max(self._run_s, 1e-3)))
        after = [await self._timed(evaluate) for _ in range(runs)]
        return judge_scores(self._before, after, self._margin)

    async def _timed(self, evaluate: Evaluate) -> Score:
        begun_s = self._clock()
        score = await evaluate()
        self._run_s = self._clock() - begun_s
        return score
