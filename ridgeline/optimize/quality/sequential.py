"""A sequential test: read more text until every threshold is decided, without false passes.

The first look reads a little; each further one doubles it. Stopping at the first pass over many
looks would pass too often, so all looks share one error probability: 5 % per threshold, two-sided.
Each look before the last spends half a percent, the last one the remainder. The sum bounds the
total by Bonferroni's inequality regardless of how the looks depend on each other (they share most
of their text) and of when the time ends, since the end of the time does not depend on the data. A
decided threshold stays decided. A change passes when all thresholds have passed (an intersection-
union test, which needs no further correction) and fails with the first one that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from ridgeline.optimize.quality.greedy_divergence import Divergence
from ridgeline.optimize.quality.task_questions import TaskScore
from ridgeline.optimize.quality.text_comparison import TextSummary
from ridgeline.optimize.quality.thresholds import GateVerdict, ThresholdCheck, worst_verdict
from ridgeline.stats import Interval

ERROR = 0.05
INTERIM = 0.005


class QualityVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the panel.

    `perplexity_before` and `perplexity_after` are over the same positions (None if the model scored
    no text); `perplexity_error` is the standard error of the logarithm of their ratio, paired by
    window. `num_flips`: positions whose most likely token changed. `num_looks`: how often the
    evidence was examined.
    """

    verdict: GateVerdict
    checks: tuple[ThresholdCheck, ...]
    perplexity_before: Interval | None = None
    perplexity_after: Interval | None = None
    num_positions: int = 0
    num_windows: int = 0
    num_flips: int = 0
    num_looks: int = 0
    perplexity_error: float = 0.0
    tasks: tuple[TaskScore, ...] = ()
    divergence: Divergence | None = None

    def check(self, name: str) -> ThresholdCheck:
        return next(check for check in self.checks if check.name == name)


def with_check(quality: QualityVerdict | None, check: ThresholdCheck) -> QualityVerdict:
    """The result with one more check; its verdict is the worst of both."""
    if quality is None:
        return QualityVerdict(verdict=check.verdict, checks=(check,))
    worst = worst_verdict((quality.verdict, check.verdict))
    return msgspec.structs.replace(quality, verdict=worst, checks=(*quality.checks, check))


class PanelPart(Protocol):
    """A part of the panel that can be extended: held-out text or one task."""

    def read(self, look: int) -> bool: ...

    def checks(self, level: float) -> Sequence[ThresholdCheck]: ...


class TextPart(PanelPart, Protocol):
    """Held-out text, however it is read."""

    def summary(self) -> TextSummary: ...


class TaskPart(PanelPart, Protocol):
    """Questions with right answers, of one kind or several."""

    def scores(self) -> tuple[TaskScore, ...]: ...


class SequentialPanel:
    """The panel for one candidate. `clock` (seconds) predicts what a further look costs.

    `text` is None where only questions are asked.
    """

    def __init__(
        self,
        text: TextPart | None,
        tasks: Sequence[TaskPart],
        *,
        max_looks: int,
        clock: Callable[[], float],
    ) -> None:
        self._text, self._tasks = text, tasks
        self._parts: list[PanelPart] = [*tasks] if text is None else [text, *tasks]
        self._open = self._parts
        self._max_looks, self._clock = max_looks, clock
        self._checks: dict[str, ThresholdCheck] = {}
        self._num_looks, self._spent_s = 0, 0.0

    @property
    def verdict(self) -> GateVerdict:
        """The verdict so far."""
        return worst_verdict(check.verdict for check in self._checks.values())

    def look(self) -> None:
        """Take one more look."""
        begun_s = self._clock()
        more = [part for part in self._open if part.read(self._num_looks)]
        self._num_looks += 1
        last = self._num_looks == self._max_looks or not more
        self._judge(self._level(last, self._num_looks - 1))
        self._open = [] if last else [part for part in more if not self._settled(part)]
        self._spent_s += self._clock() - begun_s

    def run(self, limit_s: float) -> None:
        """Look until decided, or until the next look would take the total beyond `limit_s`."""
        while self.verdict == "inconclusive" and (self._open or not self._num_looks):
            if self._num_looks and 2 * self._spent_s > limit_s:
                break  # a look doubles the text read, and so its cost
            self.look()
        if self.verdict == "inconclusive" and self._open:
            self._judge(self._level(True, self._num_looks))
            self._open = []

    def _level(self, last: bool, num_interim: int) -> float:
        """Confidence level of a look, after `num_interim` looks have spent their share."""
        return 1 - (ERROR - INTERIM * num_interim if last else INTERIM)

    def _judge(self, level: float) -> None:
        for part in self._parts:
            for check in part.checks(level):
                old = self._checks.get(check.name)
                if old is None or old.verdict == "inconclusive":
                    self._checks[check.name] = check

    def _settled(self, part: PanelPart) -> bool:
        names = [check.name for check in part.checks(1 - INTERIM)]
        return all(self._checks[name].verdict != "inconclusive" for name in names)

    def conclude(self, divergence: Divergence | None = None) -> QualityVerdict:
        """The result so far."""
        text = None if self._text is None else self._text.summary()
        return QualityVerdict(
            verdict=self.verdict,
            checks=tuple(self._checks.values()),
            **({} if text is None else msgspec.structs.asdict(text)),
            num_looks=self._num_looks,
            tasks=tuple(score for task in self._tasks for score in task.scores()),
            divergence=divergence,
        )
