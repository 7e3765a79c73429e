"""Runs loads against deployments: owns load, seeds, time budget and progress reports.

Every probe and round gets a fresh seed. A prompt that was sent before would hit the prefix cache
and make the configuration measured second look better than the first.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from ridgeline.errors import UserError
from ridgeline.measure.goodput_search import GoodputResult, Probe, find_goodput
from ridgeline.optimize.comparison.early_stop import time_to_decide_s
from ridgeline.optimize.comparison.objective import JudgedRun, Objective, StopWhenLost, judge_run
from ridgeline.optimize.environment import Deployment, Load
from ridgeline.optimize.time_budget import OutOfTimeError, TimeBudget
from ridgeline.records import RunTrace, Slo
from ridgeline.records.progress import Observer, StageAdvanced
from ridgeline.report.numbers import rounded
from ridgeline.stats import NO_PRIOR, Prior

MAX_RESPONSE_S = 30.0  # longest wait for a response if the SLO does not limit e2e


class RoundVariance:
    """Variance of the rounds of the last few comparisons around their means.

    Three rounds alone estimate their own variance poorly, so Student's interval is about twice as
    wide as necessary. Rounds of one search are alike, so earlier comparisons count too, up to
    `MOST` degrees of freedom.
    """

    DUELS, MOST = 3, 6

    def __init__(self) -> None:
        self._recent: deque[tuple[float, int]] = deque(maxlen=self.DUELS)

    def note(self, log_ratios: Sequence[float]) -> None:
        if len(log_ratios) > 1:
            mean = math.fsum(log_ratios) / len(log_ratios)
            squares = math.fsum((value - mean) ** 2 for value in log_ratios)
            self._recent.append((squares, len(log_ratios) - 1))

    @property
    def recent(self) -> tuple[tuple[float, int], ...]:
        """Sums of squares of the last comparisons, and their degrees of freedom."""
        return tuple(self._recent)

    def restore(self, recent: Sequence[tuple[float, int]]) -> None:
        """Continue with the comparisons of an interrupted search."""
        self._recent.extend(recent)

    @property
    def prior(self) -> Prior:
        freedom = sum(degrees for _, degrees in self._recent)
        if not freedom:
            return NO_PRIOR
        return Prior(sum(squares for squares, _ in self._recent) / freedom, min(freedom, self.MOST))


LATE_S = 5.0  # a run that ends as late after the budget still counts
BUSY_REPEATS = 2  # of a measurement that other work disturbed


class MachineBusyError(Exception):
    """Other work took the CPU during a measurement and all of its repeats."""

    def __init__(self, share: float) -> None:
        super().__init__(share)
        self.share = share


class LoadRunner:
    """Runs loads within the budget and reports progress to the observer."""

    def __init__(
        self,
        *,
        slo: Slo,
        objective: Objective,
        budget: TimeBudget,
        observer: Observer,
        seed: int,
        longest_output: int,
        shared_machine: bool = False,
    ) -> None:
        self._shared_machine = shared_machine
        self.slo, self.objective, self.budget = slo, objective, budget
        self._observer, self._seed = observer, seed
        decided_s = None if objective == "latency" else time_to_decide_s(slo)
        whole_s = _longest_good_answer_s(slo, longest_output)
        self._grace_s = whole_s if decided_s is None else min(decided_s, whole_s)
        self._stage = "start"
        self.spread = RoundVariance()

    def stage(self, name: str, doing: str) -> None:
        self._stage = name
        self.report(doing)

    def report(self, doing: str) -> None:
        spent_s, total_s = self.budget.spent_s, self.budget.total_s
        self._observer(
            StageAdvanced(
                stage=self._stage,
                completed=spent_s,
                total=total_s,
                detail=doing,
                remaining_s=max(0.0, total_s - spent_s),
            )
        )

    @property
    def last_seed(self) -> int:
        """The seed of the latest run."""
        return self._seed

    def continue_from(self, seed: int) -> None:
        """Give the next run the seed after this one: earlier prompts were sent before."""
        self._seed = seed

    def fresh_seed(self) -> int:
        self._seed += 1
        return self._seed

    @asynccontextmanager
    async def in_time(self, reserve_s: float = 0.0) -> AsyncIterator[None]:
        """End what does not leave `reserve_s` of the budget. Raises OutOfTimeError."""
        try:
            async with asyncio.timeout(max(0.0, self.budget.left_s - reserve_s)) as limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise OutOfTimeError from None

    def load(self, rate: float, seed: int) -> Load:
        """A run of the chosen length, with enough time after it to decide the SLO of its last
        requests.
        """
        window_s = self.budget.window_for(rate)
        grace_s = self.budget.grace_s(self._grace_s, window_s)
        return Load(rate=rate, seed=seed, window_s=window_s, grace_s=grace_s)

    def simulated_load(self, rate: float, seed: int) -> Load:
        """The same run in the simulator, where it takes none of the budget's time."""
        window_s = self.budget.window_for(rate)
        return Load(rate=rate, seed=seed, window_s=window_s, grace_s=self._grace_s)

    async def run(
        self, deployment: Deployment, rate: float, seed: int, doing: str, *, closing: bool = False
    ) -> JudgedRun:
        """One measured run. Raises OutOfTimeError instead of exceeding the budget."""
        if not self.budget.affords_runs(1, closing=closing):
            raise OutOfTimeError
        self.report(f"{doing} at {rounded(rate)} req/s")
        begun_s = self.budget.spent_s
        load = self.load(rate, seed)
        give_up = None if self.objective == "latency" else StopWhenLost(load, self.slo)
        async with self.in_time(-LATE_S):
            run = await deployment.run(load, give_up)
        self.budget.note_run(self.budget.spent_s - begun_s)
        return judge_run(run, load, self.slo, self.objective)

    def is_disturbed(self, judged: JudgedRun) -> bool:
        """Whether other work voids the run. On a shared machine none does: its noise counts."""
        return judged.is_busy and not self._shared_machine

    async def run_quiet(
        self, deployment: Deployment, rate: float, doing: str, *, closing: bool = False
    ) -> JudgedRun:
        """One run under a fresh seed, repeated while other work takes the CPU.

        Raises MachineBusyError if it does not stop.
        """
        judged = await self._run_repeatedly(deployment, rate, doing, closing)
        if self.is_disturbed(judged):
            raise MachineBusyError(judged.busy_share)
        return judged

    async def _run_repeatedly(
        self, deployment: Deployment, rate: float, doing: str, closing: bool
    ) -> JudgedRun:
        judged = await self.run(deployment, rate, self.fresh_seed(), doing, closing=closing)
        for _ in range(BUSY_REPEATS):
            if not self.is_disturbed(judged):
                break
            self.report_busy(judged.busy_share)
            try:
                judged = await self.run(deployment, rate, self.fresh_seed(), doing, closing=closing)
            except OutOfTimeError:
                break  # with a run that was disturbed
        return judged

    def report_busy(self, share: float) -> None:
        self.report(f"other work took {share:.0%} of the CPU: measuring again")

    async def search(
        self, deployment: Deployment, low: float, max_probes: int, doing: str
    ) -> tuple[GoodputResult, list[JudgedRun]]:
        """Find roughly the largest load that meets the SLO, from `low` upwards; returns every
        probe. On a machine that stays busy the result is what could be measured, as when the budget
        ends. Raises OutOfTimeError if there is no run at all.
        """
        runs: list[JudgedRun] = []
        probes: list[Probe] = []

        async def run_at(rate: float) -> RunTrace:
            judged = await self._run_repeatedly(deployment, rate, doing, False)
            runs.append(judged)
            return judged.trace

        try:
            result = await find_goodput(
                run_at,
                self.slo,
                low,
                64 * low,
                self.budget.left_s,
                tolerance=0.2,
                max_probes=max_probes,
                clock=lambda: self.budget.spent_s,
                on_probe=probes.append,
            )
        except OutOfTimeError:
            if not probes:
                raise
            held = [probe for probe in probes if probe.holds]
            best = max(held, key=lambda probe: probe.load, default=None)
            result = GoodputResult(probes=tuple(probes), stopped="budget", best=best)
        return result, runs


def _longest_good_answer_s(slo: Slo, longest_output: int) -> float:
    """After this many seconds a response has missed the SLO regardless of what follows."""
    if slo.e2e_s is not None:
        return min(slo.e2e_s, MAX_RESPONSE_S)
    if slo.tpot_s is None:
        return MAX_RESPONSE_S
    first_s = slo.ttft_s if slo.ttft_s is not None else MAX_RESPONSE_S
    return min(first_s + slo.tpot_s * longest_output, MAX_RESPONSE_S)


def staircase_start(result: GoodputResult, low: float) -> float:
    """Where a staircase starts: the best load moved towards the failing one, or below `low`."""
    if result.best is None:
        return low / 1.5
    failed = result.failed_load
    return (
        math.sqrt(result.best.load * min(failed, 1.5 * result.best.load))
        if failed
        else result.best.load
    )


def error_line(error: BaseException) -> str:
    """One line for the ladder, without a traceback."""
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
