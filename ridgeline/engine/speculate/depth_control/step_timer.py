"""What plain steps take, and what asking adds to them: by the clock, from step to step.

What. A decode step in which nobody was asked, behind another such step, is what decoding takes
without speculation; one in four corrects the curve, which costs what it costs. Everything else is
compared with that as a whole, from the moment a step is planned to that at which its tokens are
known: a step in which somebody was asked and nothing was drafted, and the step behind one with a
question or with drafts. So what no stopwatch inside a step sees is booked as well: code and weights
that were pushed out of the caches.

Invariant. Nothing that drafts cost makes plain steps look dear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ridgeline.engine.scheduler.plan import Run
from ridgeline.engine.speculate.depth_control.step_cost import StepTimeCurve

EVERY = 4  # plain steps of which one corrects the curve
MOST_OVER = 1.0  # plain steps by which a step is taken to have been longer: beyond it, others ran
_NOTHING = False, 0.0, 0.0
_NEW = 0.1  # weight of the latest observation of what asking costs


class Pace:
    """See the head of this file. `asking_s`: what a question that leads to no draft costs."""

    __slots__ = (
        "_after_s",
        "_asked_s",
        "_begun_s",
        "_calm",
        "_clock",
        "_has_waited",
        "_must_learn",
        "_runs",
    )

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._runs: Sequence[Run] = ()
        self._begun_s = self._asked_s = self._after_s = 0.0
        self._calm = 0  # steps since somebody was asked
        self._must_learn = self._has_waited = False

    @property
    def asking_s(self) -> float:
        return max(0.0, self._asked_s) + max(0.0, self._after_s)

    def begin(self, runs: Sequence[Run]) -> None:
        """A step was planned, up to the drafts it may carry."""
        self._runs, self._begun_s = runs, self._clock()

    def took_s(self) -> float:
        """Since then."""
        return self._clock() - self._begun_s

    def must_learn(self) -> None:
        """The next plain step behind another corrects the curve; where prompts come between, the
        second one does, whatever was before it."""
        self._must_learn = True

    def asked(self) -> None:
        """Somebody was asked in this step."""
        self._calm = 0

    def asked_in_vain(self, over_s: float, least_s: float) -> None:
        """Nothing was drafted: the step took `over_s` longer than a plain one, `least_s` of it by
        the stopwatch."""
        self._asked_s += _NEW * (max(over_s, least_s) - self._asked_s)

    def passed(self, cost: StepTimeCurve) -> tuple[bool, float, float]:
        """The step ends and nobody was asked in it: whether it corrected the curve, by how much it
        took too long, if it stands behind a question (else 0), and what a plain one takes."""
        self._calm += 1
        runs, self._runs, is_first = self._runs, (), self._calm == 1
        if not (is_first or self._must_learn or self._calm % EVERY == 0) or not runs:
            return _NOTHING
        took_s, num = self.took_s(), len(runs)
        if not is_decode(runs):
            return _NOTHING
        if is_first and not self._has_waited:
            self._has_waited = self._must_learn
            plain_s = cost.seconds(num, num)
            most_s = MOST_OVER * plain_s
            return False, max(-most_s, min(most_s, took_s - plain_s)), plain_s
        self._must_learn = self._has_waited = False
        cost.learn(num, num, took_s)
        return True, 0.0, 0.0

    def after_in_vain(self, over_s: float) -> None:
        """The step behind a question that led to no draft."""
        self._after_s += _NEW * (over_s - self._after_s)


def is_decode(runs: Sequence[Run]) -> bool:
    """Every run feeds one known token."""
    return all(len(run.tokens) - run.num_drafts == 1 for run in runs)
