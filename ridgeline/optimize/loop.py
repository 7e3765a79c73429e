"""The climb: measure, name the bound, rank, try the best, keep it or take it back, again.

    baseline      what a naive deployment does, at its own best load
    rank          every rung's promise, simulated from the incumbent's measured steps
    try           open the candidate beside the incumbent, check its tokens, measure both in
                  alternation, gate its quality if it is lossy
    keep or not   with the reason, either way
    close         baseline against final, in alternation: the headline is measured, never
                  multiplied up

Nothing here knows a technique, an engine or a clock: rungs are rows, subjects and time come in
from outside (`ridgeline.optimize.subject.Lab`). A candidate that cannot run, crashes or runs out
of memory is an outcome of its trial. Ctrl-C ends the climb with what was found so far.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec

from ridgeline.config.settings import Settings, settings_from
from ridgeline.errors import BadInput, RidgelineError
from ridgeline.measure.search import GoodputResult
from ridgeline.optimize.assemble import (
    Account,
    Evidence,
    finish,
    measured_trial,
    standing,
)
from ridgeline.optimize.budget import CLOSING_ROUNDS, MAX_ROUNDS, Budget
from ridgeline.optimize.checks import Gatekeeper
from ridgeline.optimize.duel import Duel, Side, duel
from ridgeline.optimize.ground import Ground, OutOfTimeError, reason_of, start_of
from ridgeline.optimize.job import Contender, Job
from ridgeline.optimize.ladder import Candidate, Ladder
from ridgeline.optimize.objective import Reading
from ridgeline.optimize.observe import Observer, Silent
from ridgeline.optimize.predict import Forecast, Predictor
from ridgeline.optimize.ranking import Ranking
from ridgeline.optimize.result import Ended, LadderResult, Trial
from ridgeline.optimize.subject import Lab, Subject
from ridgeline.records import StepStat

SEARCH_PROBES = 8
LOWER_STARTS = 3


class InterruptedEarlyError(RidgelineError):
    """Stopped before even the baseline was measured: there is nothing to report."""


async def optimize(
    job: Job,
    lab: Lab,
    ladder: Ladder,
    *,
    clock: Callable[[], float],
    observer: Observer | None = None,
) -> LadderResult:
    """Climb until nothing promises more or the budget ends. BadInput for a hopeless budget."""
    climb = Climb(job, lab, ladder, Budget(job.budget_s, clock), observer or Silent())
    try:
        return await climb.run()
    finally:
        climb.close()


class Climb:
    """The state of one climb: the incumbent, what was tried, what was not."""

    def __init__(
        self, job: Job, lab: Lab, ladder: Ladder, budget: Budget, observer: Observer
    ) -> None:
        self._job, self._lab = job, lab
        self._budget, self._observer = budget, observer
        self._ground = Ground(
            slo=job.slo,
            objective=job.objective,
            budget=budget,
            observer=observer,
            seed=job.seed,
            longest_output=lab.longest_output,
        )
        self._predictor = Predictor(
            lab.oracle,
            job.slo,
            job.objective,
            ladder.weights,
            lambda rate: self._ground.load(rate, job.seed),
        )
        self._ranking = Ranking(job, lab, ladder, self._predictor, budget)
        self._gates = Gatekeeper(lab, self._ground)
        self._stack = ExitStack()
        self._trials: list[Trial] = []
        self._tried: set[tuple[Settings, str | None]] = set()
        self._baseline: Contender | None = None
        self._incumbent: Contender | None = None

    # ---- the life of a climb -------------------------------------------------------------------

    async def run(self) -> LadderResult:
        """Baseline, rungs, closing; an interruption keeps what there is."""
        closing: Duel | None = None
        try:
            await self._measure_baseline()
            ended = await self._climb()
            closing = await self._close_the_account()
        except (KeyboardInterrupt, asyncio.CancelledError):
            ended = "interrupted"
        return self._result(ended, closing)

    def close(self) -> None:
        """Shut whatever is still open."""
        self._stack.close()

    async def _measure_baseline(self) -> None:
        job, ground = self._job, self._ground
        settings = settings_from({**msgspec.to_builtins(job.settings), **self._lab.start})
        ground.stage("Baseline", self._lab.start_words)
        subject, stack = self._open(settings)
        answer_s = await self._gates.time_one_answer(subject)
        self._budget.choose_window(answer_s)
        self._budget.note_run(self._budget.window_s + answer_s)
        self._refuse_hopeless_budget()
        low = 0.4 / max(answer_s, 1e-3)
        try:
            found, readings = await self._first_load(subject, low)
        except OutOfTimeError:
            raise self._hopeless() from None
        rate = start_of(found, low)
        self._baseline = self._incumbent = Contender(
            label="baseline",
            settings=settings,
            subject=subject,
            stack=stack,
            rate=rate,
            readings=_near(readings, rate),
            settled=found.best is not None and found.failed_load is not None,
        )
        self._tried.add((settings, None))
        self._predictor.learn_steps(settings, self._steps_of(readings, settings))

    async def _first_load(
        self, subject: Subject, low: float
    ) -> tuple[GoodputResult, list[Reading]]:
        """The baseline's search. Where even its first load fails (a machine that others disturb, an
        answer that was timed in a lucky moment), it begins lower: one bad run is no verdict.
        """
        seen: list[Reading] = []
        for _ in range(LOWER_STARTS):
            found, readings = await self._ground.search(
                subject, low, SEARCH_PROBES, "searching its load"
            )
            seen += readings
            if found.best is not None:
                break
            low /= 3
        return found, seen

    def _refuse_hopeless_budget(self) -> None:
        if self._budget.left_s < self._budget.smallest_s:
            raise self._hopeless()

    def _hopeless(self) -> BadInput:
        needed_s = self._budget.spent_s + 1.5 * self._budget.smallest_s
        return BadInput(
            "the budget is too small to measure a baseline and one rung",
            value=f"{self._budget.total_s:.0f} s",
            limit=f"about {needed_s:.0f} s for this model on this machine",
            fix=f"--budget {needed_s / 60:.0f}m" if needed_s > 90 else f"--budget {needed_s:.0f}s",
        )

    async def _climb(self) -> Ended:
        """Try the most promising rung until none is left or the time is."""
        while True:
            self._ground.stage("Ranking", "simulating rungs from the incumbent's measured steps")
            promising = self._ranking.rank(self._the_incumbent, self._tried, self._trials)
            if not promising:
                return "nothing promises more"
            if not self._budget.affords_trial():
                self._ranking.leave_out_for_time(promising)
                return "budget spent"
            await self._try(promising[0])

    # ---- one trial -----------------------------------------------------------------------------

    async def _try(self, forecast: Forecast) -> None:
        """Open, check, measure, gate, decide. Whatever goes wrong is this trial's outcome."""
        candidate = forecast.candidate
        self._tried.add((candidate.settings, candidate.make))
        evidence = Evidence(forecast, begun_s=self._budget.spent_s)
        self._ground.stage(candidate.label, "opening it beside the incumbent")
        stack = ExitStack()
        try:
            candidate = evidence.is_of(self._made(candidate))
            subject, stack = self._open(candidate.settings)
            contender = await self._put_to_the_test(candidate, subject, stack, evidence)
        except Exception as error:  # whatever a candidate does, the climb goes on
            stack.close()
            contender = None
            evidence.failed(error, reason_of(error))
        trial = measured_trial(evidence, self._lab, self._job, self._budget.spent_s)
        self._trials.append(trial)
        self._observer.tried(trial)
        self._know_the_baseline(evidence)
        if trial.verdict == "kept" and contender is not None:
            self._promote(contender)
        else:
            stack.close()
            self._learn_from(trial)
            self._note_readings(evidence)

    def _made(self, candidate: Candidate) -> Candidate:
        """The candidate with its weights made, where they are to be made first."""
        if candidate.make is None:
            return candidate
        self._ground.tell(f"making its weights ({candidate.make})")
        spare_s = self._budget.left_s - self._budget.closing_cost_s - self._budget.trial_cost_s
        settings = self._lab.make(candidate.settings, candidate.make, max(0.0, spare_s))
        return msgspec.structs.replace(candidate, settings=settings)

    async def _put_to_the_test(
        self, candidate: Candidate, subject: Subject, stack: ExitStack, evidence: Evidence
    ) -> Contender | None:
        """The candidate as a contender, or None where its tokens or the time ended it before."""
        incumbent = self._the_incumbent
        honesty = candidate.rung.honesty
        if not await self._gates.says_the_same(honesty, incumbent.subject, subject, evidence):
            return None
        fixed = self._job.objective == "latency"
        start = incumbent.rate * (1.0 if fixed else max(1.0, evidence.forecast.worth))
        evidence.duel = found = await duel(
            self._ground,
            Side(
                "incumbent",
                incumbent.subject,
                incumbent.rate,
                fixed=fixed,
                settled=incumbent.settled,
            ),
            Side("candidate", subject, start, fixed=fixed),
            max_rounds=MAX_ROUNDS,
        )
        await self._gates.examine_to_the_end(incumbent.subject, subject, evidence)
        return Contender(
            label=candidate.label,
            settings=candidate.settings,
            subject=subject,
            stack=stack,
            rate=found.after_rate,
            readings=found.after,
            settled=True,
        )

    def _know_the_baseline(self, evidence: Evidence) -> None:
        """Rounds show the baseline at its knee, many times: better than the search's last probe."""
        found, baseline = evidence.duel, self._the_baseline
        if found is None or found.ratio is None:
            return
        if self._the_incumbent.settings == baseline.settings:
            self._baseline = msgspec.structs.replace(
                baseline, rate=found.before_rate, readings=found.before, settled=True
            )

    def _promote(self, contender: Contender) -> None:
        """The candidate is the incumbent now; the old one is shut."""
        if self._trials[-1].honesty == "lossy":
            self._gates.baseline_is_gone()
        self._the_incumbent.stack.close()
        self._incumbent = contender
        steps = self._steps_of(contender.readings, contender.settings)
        self._predictor.learn_steps(contender.settings, steps)
        self._learn_from(self._trials[-1])

    def _note_readings(self, evidence: Evidence) -> None:
        """The incumbent stays; what the rounds showed of it is newer than what was known."""
        if evidence.duel is not None and evidence.duel.ratio is not None:
            self._incumbent = msgspec.structs.replace(
                self._the_incumbent,
                rate=evidence.duel.before_rate,
                readings=evidence.duel.before,
                settled=True,
            )

    def _learn_from(self, trial: Trial) -> None:
        if trial.verdict == "quality failed" or (trial.verdict == "regressed" and not trial.ratio):
            self._predictor.learn_failure(trial.rung)
        if trial.ratio is not None:
            self._predictor.learn_trial(trial.rung, trial.predicted, trial.ratio.mid)

    # ---- the end -------------------------------------------------------------------------------

    async def _close_the_account(self) -> Duel | None:
        """Baseline against final in alternation, if anything was kept."""
        baseline, final = self._the_baseline, self._the_incumbent
        if final.settings == baseline.settings:
            return None
        self._ground.stage("Closing", "measuring baseline against final, in alternation")
        try:
            subject, _ = self._open(baseline.settings)
        except OutOfTimeError:
            return None
        fixed = self._job.objective == "latency"
        return await duel(
            self._ground,
            Side("baseline", subject, baseline.rate, fixed=fixed, settled=True),
            Side("final", final.subject, final.rate, fixed=fixed, settled=True),
            max_rounds=CLOSING_ROUNDS,
            closing=True,
        )

    def _result(self, ended: Ended, closing: Duel | None) -> LadderResult:
        if self._baseline is None or self._incumbent is None:
            raise InterruptedEarlyError("interrupted before the baseline was measured")
        before, after = self._baseline.readings, self._incumbent.readings
        if closing is not None and closing.before:
            before, after = closing.before, closing.after
        account = Account(
            ended=ended,
            spent_s=self._budget.spent_s,
            window_s=self._budget.window_s,
            trials=tuple(self._trials),
            not_tried=self._ranking.left_out,
            total=closing.ratio if closing else None,
            slo_holds=any(reading.holds for reading in after),
        )
        job, lab = self._job, self._lab
        first = standing("baseline", self._baseline, before, lab, job)
        last = standing("final", self._incumbent, after, lab, job)
        return finish(job, lab, account, first, last)

    # ---- small things --------------------------------------------------------------------------

    @property
    def _the_incumbent(self) -> Contender:
        assert self._incumbent is not None, "the baseline comes first"
        return self._incumbent

    @property
    def _the_baseline(self) -> Contender:
        assert self._baseline is not None, "the baseline comes first"
        return self._baseline

    def _steps_of(self, readings: Sequence[Reading], settings: Settings) -> list[StepStat]:
        return [step for reading in readings for step in self._lab.steps_of(reading.run, settings)]

    def _open(self, settings: Settings) -> tuple[Subject, ExitStack]:
        """Open a configuration on a stack of its own, which this climb closes at the latest."""
        begun_s = self._budget.spent_s
        stack = self._stack.enter_context(ExitStack())
        subject = stack.enter_context(self._lab.open(settings))
        self._budget.note_open(self._budget.spent_s - begun_s)
        return subject, stack


def _near(readings: list[Reading], rate: float) -> tuple[Reading, ...]:
    """The readings at the loads closest to the one that was chosen."""
    held = [reading for reading in readings if reading.holds] or readings
    best = min(held, key=lambda reading: abs(reading.rate - rate))
    return (best,)
