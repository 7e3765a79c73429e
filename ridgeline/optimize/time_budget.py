"""The time budget of a search: what is left, what a run costs, and how long runs may be.

The budget covers everything from the first baseline run to the closing comparison. Before each step
the search checks that its cost leaves the reserve for the closing comparison, without which
the other results would be worth little. Costs are learnt from the runs already made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import msgspec

Clock = Callable[[], float]

MIN_ROUNDS = 3
MAX_ROUNDS = 5
CLOSING_ROUNDS = 8  # at most; more rounds narrow the headline interval
MIN_TRIALS = 3  # that a budget should have room for
RUNS_IN_SHORT_BUDGET = 60  # runs of a search with that number of trials
RUNS_IN_BUDGET = 160  # approximate number of runs in a search
MIN_WINDOW_S = 1.5
MAX_WINDOW_S = 60.0
ANSWERS_PER_WINDOW = 4  # a window of fewer responses is not long in the steady state
MIN_ANSWERS_PER_WINDOW = 1.5  # where the budget has no time for more
REPORT_S = 2.0
MIN_REQUESTS = 6  # per run; slow configurations get a longer window
MAX_STRETCH = 2.5  # longest window, in usual windows


SMALLEST_BUDGET_S = (4 + 2 * MIN_ROUNDS + 3 + 2 * MIN_ROUNDS) * MIN_WINDOW_S + REPORT_S
"""What a search takes if runs have the minimum length and a model opens at once."""


class OutOfTimeError(Exception):
    """The budget ended during a measurement or a start; earlier measurements remain valid."""


_TIME_LEFT: ContextVar[Callable[[], float] | None] = ContextVar("time_left", default=None)


@contextmanager
def limited(time_left: Callable[[], float]) -> Iterator[None]:
    """Inside, what waits for a server knows the seconds that it may take."""
    token = _TIME_LEFT.set(time_left)
    try:
        yield
    finally:
        _TIME_LEFT.reset(token)


def time_left_s() -> float:
    """Seconds that a wait for a server may take; infinite outside of a search."""
    left = _TIME_LEFT.get()
    return math.inf if left is None else left()


class BudgetState(msgspec.Struct, frozen=True, kw_only=True):
    """What a search has spent and learnt about costs, in seconds."""

    spent_s: float
    window_s: float
    run_costs_s: tuple[float, ...]
    open_cost_s: float
    baseline_run_s: float
    warm_up_s: float = 0.0
    answer_s: float = 0.0


class TimeBudget:
    """A deadline shared by the parts of a search. Times are in seconds.

    `begun_s`: the clock's time when the user's budget began, if preparations came before.
    """

    def __init__(self, total_s: float, clock: Clock, begun_s: float | None = None) -> None:
        self.total_s, self._clock = total_s, clock
        self._begun_s = clock() if begun_s is None else begun_s
        self._run_costs_s: list[float] = []
        self._open_cost_s = self._warm_up_s = self._baseline_run_s = self._answer_s = 0.0
        self.window_s = MIN_WINDOW_S

    @property
    def state(self) -> BudgetState:
        """What to keep of an interrupted search."""
        return BudgetState(
            spent_s=self.spent_s,
            window_s=self.window_s,
            run_costs_s=tuple(self._run_costs_s),
            open_cost_s=self._open_cost_s,
            baseline_run_s=self._baseline_run_s,
            warm_up_s=self._warm_up_s,
            answer_s=self._answer_s,
        )

    def restore(self, state: BudgetState) -> None:
        """Continue as if the time of the interrupted search had been spent here."""
        self._begun_s -= state.spent_s
        self._run_costs_s = list(state.run_costs_s)
        self._open_cost_s, self._baseline_run_s = state.open_cost_s, state.baseline_run_s
        self._warm_up_s, self._answer_s = state.warm_up_s, state.answer_s
        self.window_s = state.window_s

    @property
    def spent_s(self) -> float:
        return self._clock() - self._begun_s

    @property
    def left_s(self) -> float:
        return self.total_s - self.spent_s

    def choose_window(self, answer_s: float) -> None:
        """Fix the length of runs once, from the budget and the duration of a single request."""
        self._answer_s = answer_s
        wanted = max(self.total_s / RUNS_IN_BUDGET, ANSWERS_PER_WINDOW * answer_s)
        affordable = max(self.total_s / RUNS_IN_SHORT_BUDGET, MIN_ANSWERS_PER_WINDOW * answer_s)
        wanted = min(wanted, affordable)
        self.window_s = min(max(wanted, MIN_WINDOW_S), MAX_WINDOW_S)

    def window_for(self, rate: float) -> float:
        """Length of a run at `rate` requests/s; low rates get a longer window."""
        return min(max(self.window_s, MIN_REQUESTS / rate), MAX_STRETCH * self.window_s)

    def note_run(self, seconds: float) -> None:
        self._run_costs_s.append(seconds)

    def note_open(self, seconds: float) -> None:
        self._open_cost_s = max(self._open_cost_s, seconds)

    def note_warm_up(self, seconds: float) -> None:
        """What the first answers of a configuration take in addition to its start."""
        self._warm_up_s = max(self._warm_up_s, seconds)

    def note_baseline(self, rate: float) -> None:
        """The baseline's load is `rate` requests/s now. Low rates need the longest windows."""
        if not self._baseline_run_s:  # the runs so far were the baseline's
            self._baseline_run_s = sum(self._run_costs_s) / max(1, len(self._run_costs_s))
        self._baseline_run_s = max(self._baseline_run_s, self.window_for(rate) + self._answer_s)

    @property
    def run_cost_s(self) -> float:
        """Expected cost of the next run: the mean of the last six.

        Overruns cannot accumulate, because `grace_s` ends every run in time.
        """
        recent = self._run_costs_s[-6:] or [self.window_s]
        return max(self.window_s, sum(recent) / len(recent))

    @property
    def _up_cost_s(self) -> float:
        return self._open_cost_s + self._warm_up_s

    @property
    def closing_cost_s(self) -> float:
        """The reserve: reopening the baseline and the minimum number of closing rounds."""
        run_s = self.run_cost_s
        rounds_s = MIN_ROUNDS * (run_s + max(run_s, self._baseline_run_s))
        return self._up_cost_s + rounds_s + REPORT_S

    @property
    def trial_cost_s(self) -> float:
        """The least time in which a trial can reach a verdict."""
        return 1.5 * self._up_cost_s + (2 * MIN_ROUNDS + 3) * self.run_cost_s

    @property
    def smallest_s(self) -> float:
        """The smallest budget that gives a result: baseline, a trial, the closing comparison."""
        return 4 * self.run_cost_s + self.trial_cost_s + self.closing_cost_s

    def max_rounds(self, num_trials: int) -> int:
        """Rounds of the next trial, so that `MIN_TRIALS` of them fit; `num_trials` were made."""
        spare_s = self.left_s - self.closing_cost_s
        share_s = spare_s / max(1, MIN_TRIALS - num_trials)
        approach_s = 1.5 * self._up_cost_s + 3 * self.run_cost_s
        rounds = int((share_s - approach_s) / (2 * self.run_cost_s))
        return min(max(rounds, MIN_ROUNDS), MAX_ROUNDS)

    def affords_trial(self) -> bool:
        return self.left_s >= self.trial_cost_s + self.closing_cost_s

    def affords_runs(self, count: int, *, closing: bool = False) -> bool:
        """Whether `count` more runs fit. With `closing` they may use the reserve."""
        reserve_s = REPORT_S if closing else self.closing_cost_s
        return self.left_s >= count * self.run_cost_s + reserve_s

    def grace_s(self, wanted_s: float, window_s: float) -> float:
        """How long a run may wait for its last requests without exceeding the budget."""
        return max(0.0, min(wanted_s, self.left_s - window_s - REPORT_S / 2))
