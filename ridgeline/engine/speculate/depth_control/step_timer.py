"""Times plain steps and the overhead of deciding, from step to step.

A decode step without a decision, following another such step, shows the cost of decoding without
speculation; one in four corrects the curve. Everything else is compared with it as a whole, from
the planning of a step until its tokens are known: a step with a decision but no drafts, and the
step after a decision or drafts. So effects that no timer inside a step sees are included, such as
code and weights evicted from caches.

Invariant: the cost of drafts never makes plain steps look expensive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ridgeline.engine.scheduler.plan import Run
from ridgeline.engine.speculate.depth_control.step_cost import StepTimeCurve

EVERY = 4  # plain steps of which one corrects the curve
MAX_EXCESS = 1.0  # cap on a step's excess, in plain steps: beyond it, other work ran
_NOTHING = False, 0.0, 0.0
_NEW = 0.1  # weight of the latest observation of the cost of a decision


class PlainStepTimer:
    """Times plain steps. `decision_s`: the cost of a decision that leads to no draft."""

    __slots__ = (
        "_after_s",
        "_begun_s",
        "_clock",
        "_has_waited",
        "_must_learn",
        "_runs",
        "_since_decision",
        "_unused_decision_s",
    )

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._runs: Sequence[Run] = ()
        self._begun_s = self._unused_decision_s = self._after_s = 0.0
        self._since_decision = 0  # steps since the last decision
        self._must_learn = self._has_waited = False

    @property
    def decision_s(self) -> float:
        return max(0.0, self._unused_decision_s) + max(0.0, self._after_s)

    def begin(self, runs: Sequence[Run]) -> None:
        """A step was planned, up to the drafts it may carry."""
        self._runs, self._begun_s = runs, self._clock()

    def took_s(self) -> float:
        """Seconds since then."""
        return self._clock() - self._begun_s

    def request_learning(self) -> None:
        """Make the next plain step after another correct the curve; with prompts in between, the
        second one.
        """
        self._must_learn = True

    def mark_decision(self) -> None:
        """A decision was made in this step."""
        self._since_decision = 0

    def learn_unused_decision(self, over_s: float, least_s: float) -> None:
        """Nothing was drafted: the step took `over_s` longer than a plain one, at least `least_s`
        by the timer.
        """
        self._unused_decision_s += _NEW * (max(over_s, least_s) - self._unused_decision_s)

    def end_undecided_step(self, cost: StepTimeCurve) -> tuple[bool, float, float]:
        """The step ends without a decision.

        Returns whether it corrected the curve, its excess if it follows a decision (else 0), and
        the cost of a plain step.
        """
        self._since_decision += 1
        runs, self._runs, is_first = self._runs, (), self._since_decision == 1
        if not (is_first or self._must_learn or self._since_decision % EVERY == 0) or not runs:
            return _NOTHING
        took_s, num = self.took_s(), len(runs)
        if not is_decode(runs):
            return _NOTHING
        if is_first and not self._has_waited:
            self._has_waited = self._must_learn
            plain_s = cost.seconds(num, num)
            max_excess_s = MAX_EXCESS * plain_s
            return False, max(-max_excess_s, min(max_excess_s, took_s - plain_s)), plain_s
        self._must_learn = self._has_waited = False
        cost.learn(num, num, took_s)
        return True, 0.0, 0.0

    def learn_following_step(self, over_s: float) -> None:
        """The step after a decision without drafts."""
        self._after_s += _NEW * (over_s - self._after_s)


def is_decode(runs: Sequence[Run]) -> bool:
    """Whether every run feeds one known token."""
    return all(len(run.tokens) - run.num_drafts == 1 for run in runs)
