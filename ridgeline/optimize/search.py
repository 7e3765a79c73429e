"""The search: measure, find the bound, rank the rungs, try the best, keep or discard it, repeat.

  baseline   the configuration that the user has, at its best load
  defaults   the settings as shipped, as the first candidate, if the baseline has others
  rank       predict every rung's gain by simulating from the incumbent's measured steps
  try        open the candidate next to the incumbent, check its tokens, measure both in
             alternation, judge its quality if it is lossy
  decide     keep or discard, with the reason
  close      compare baseline and final configuration in alternation: the headline is measured,
             never multiplied up from the trials. If the final configuration loses, everything that
             was kept is reverted

The search knows no technique, engine or clock: rungs are data, and deployments and time come from
an `Environment`. A candidate that cannot run, crashes or runs out of memory is an outcome of its
trial. Ctrl-C ends the search with the results so far.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import msgspec

from ridgeline.config.settings import Settings
from ridgeline.errors import RidgelineError
from ridgeline.hardware.open_files import OpenFilesError
from ridgeline.optimize.baseline import measure_baseline
from ridgeline.optimize.comparison.load_runner import LoadRunner, error_line
from ridgeline.optimize.comparison.objective import JudgedRun
from ridgeline.optimize.comparison.paired_comparison import (
    ComparisonSide,
    PairedComparison,
    compare_in_rounds,
)
from ridgeline.optimize.drivers.base import ServerCrashedError
from ridgeline.optimize.environment import Deployment, Environment
from ridgeline.optimize.job import OptimizeJob, RunningConfiguration
from ridgeline.optimize.ladder import DEFAULTS, Ladder, RungCandidate, defaults_candidate
from ridgeline.optimize.ranking.predictor import Forecast, Predictor
from ridgeline.optimize.ranking.rung_ranking import RankedRungs, Ranking
from ridgeline.optimize.result import Ended, LadderResult, Trial
from ridgeline.optimize.result_builder import (
    SearchTotals,
    TrialEvidence,
    build_result,
    build_trial,
    revert_kept,
    summarise_configuration,
    why_reverted,
)
from ridgeline.optimize.search_state import (
    ClosedDeployment,
    SavedConfiguration,
    SavedSearch,
    StateFile,
    request_of,
    saved_settings,
)
from ridgeline.optimize.server_settings import changed_settings
from ridgeline.optimize.time_budget import (
    CLOSING_ROUNDS,
    OutOfTimeError,
    TimeBudget,
    limited,
)
from ridgeline.optimize.trial_checks import CandidateChecks
from ridgeline.records import StepStat
from ridgeline.records.progress import Observer, TrialFinished, silent


class InterruptedEarlyError(RidgelineError):
    """Interrupted before the baseline was measured; there is no result."""


async def rank_rungs(
    job: OptimizeJob,
    environment: Environment,
    ladder: Ladder,
    *,
    clock: Callable[[], float],
    begun_s: float | None = None,
    observer: Observer = silent,
) -> RankedRungs:
    """Measure the baseline and rank the ladder. Raises BadInput if the budget is too small, and
    Inconclusive if it ends before there is a baseline.

    `begun_s`: the clock's time when the budget began; without it, now.
    """
    budget = TimeBudget(job.budget_s, clock, begun_s)
    search = LadderSearch(job, environment, ladder, budget, observer)
    try:
        with limited(search.time_left_s):
            return await search.rank_without_trials()
    finally:
        search.close()


async def optimize(
    job: OptimizeJob,
    environment: Environment,
    ladder: Ladder,
    *,
    clock: Callable[[], float],
    begun_s: float | None = None,
    observer: Observer = silent,
    state: StateFile | None = None,
) -> LadderResult:
    """Search until no rung is predicted to gain or the budget ends.

    `begun_s`: the clock's time when the budget began; without it, now. `state`: where to keep what
    was learnt, and to continue from. Raises BadInput if the budget is too small for a baseline and
    one trial, and Inconclusive if it ends before there is a baseline.
    """
    budget = TimeBudget(job.budget_s, clock, begun_s)
    search = LadderSearch(job, environment, ladder, budget, observer)
    try:
        with limited(search.time_left_s):
            return await search.run(state)
    finally:
        search.close()


class LadderSearch:
    """The state of one search: the incumbent, the trials, the rungs left out."""

    def __init__(
        self,
        job: OptimizeJob,
        environment: Environment,
        ladder: Ladder,
        budget: TimeBudget,
        observer: Observer,
    ) -> None:
        self._job, self._environment = job, environment
        self._budget, self._observer = budget, observer
        self._runner = LoadRunner(
            slo=job.slo,
            objective=job.objective,
            budget=budget,
            observer=observer,
            seed=job.seed,
            longest_output=environment.longest_output,
            shared_machine=job.shared_machine,
        )
        self._predictor = Predictor(
            environment.simulator,
            job.slo,
            job.objective,
            ladder.weights,
            lambda rate: self._runner.simulated_load(rate, job.seed),
        )
        self._ranking = Ranking(job, environment, ladder, self._predictor, budget)
        self._checks = CandidateChecks(environment, self._runner)
        self._stack = ExitStack()
        self._reserve_s = 0.0  # of the budget, for what follows a trial
        self._state: StateFile | None = None
        self._trials: list[Trial] = []
        self._tried: set[tuple[Settings, str | None]] = set()
        self._baseline: RunningConfiguration | None = None
        self._incumbent: RunningConfiguration | None = None

    # -- the whole search

    async def run(self, state: StateFile | None = None) -> LadderResult:
        """Baseline, trials, closing comparison. An interruption keeps the results so far."""
        closing: PairedComparison | None = None
        self._state = state
        saved = None if state is None else state.load(self._job)
        try:
            if saved is None:
                await self._measure_baseline()
            else:
                self._take_over(saved)
                try:
                    await self._reopen_incumbent()
                except OutOfTimeError:
                    return self._result("budget spent", None)
            self._save()
            await self._try_defaults()
            ended = await self._try_rungs()
            closing = await self._compare_with_baseline()
        except (KeyboardInterrupt, asyncio.CancelledError):
            ended = "interrupted"
            # A wait that blocked has raised before the request to cancel was delivered: take it
            # here, or it would discard the result.
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        return self._result(ended, closing)

    def _take_over(self, saved: SavedSearch) -> None:
        """Take over the state of an interrupted search, whose configurations are not up."""
        self._budget.restore(saved.budget)
        self._predictor.restore(saved.predictor)
        self._runner.continue_from(saved.seed)
        self._runner.spread.restore(saved.spread)
        self._checks.restore_user_scores(saved.user_scores)
        self._trials = list(saved.trials)
        self._tried = {(saved_settings(values, self._job), make) for values, make in saved.tried}
        self._ranking.restore_failures(
            [
                (saved_settings(settings, self._job), saved_settings(incumbent, self._job))
                for settings, incumbent in saved.failures
            ]
        )
        if any(trial.honesty == "lossy" and trial.verdict == "kept" for trial in saved.trials):
            self._ranking.forget_references()
        self._runner.stage("Resuming", f"{len(saved.trials)} trial(s) are known")
        self._baseline, self._incumbent = map(self._closed, (saved.baseline, saved.incumbent))
        for configuration in (self._baseline, self._incumbent):
            steps = self._steps_of(configuration.runs, configuration.settings)
            self._predictor.learn_steps(configuration.settings, steps)

    async def _reopen_incumbent(self) -> None:
        """Open the incumbent of an interrupted search again. Raises OutOfTimeError."""
        incumbent = self._running_incumbent
        deployment, stack = self._open(incumbent.settings)
        async with self._runner.in_time():
            await self._checks.time_one_answer(deployment)
        self._incumbent = msgspec.structs.replace(incumbent, deployment=deployment, stack=stack)
        if self._running_baseline.settings == incumbent.settings:
            self._baseline = self._incumbent

    def _closed(self, saved: SavedConfiguration) -> RunningConfiguration:
        return RunningConfiguration(
            label=saved.label,
            settings=saved_settings(saved.settings, self._job),
            deployment=ClosedDeployment(saved.info),
            stack=ExitStack(),
            rate=saved.rate,
            runs=saved.runs,
            settled=saved.settled,
        )

    def _save(self) -> None:
        """Write the state, from which a later call can continue."""
        if self._state is None:
            return
        tried = tuple((msgspec.to_builtins(settings), make) for settings, make in self._tried)
        self._state.save(
            SavedSearch(
                request=request_of(self._job),
                baseline=SavedConfiguration.of(self._running_baseline),
                incumbent=SavedConfiguration.of(self._running_incumbent),
                trials=tuple(self._trials),
                tried=tried,
                predictor=self._predictor.state,
                budget=self._budget.state,
                seed=self._runner.last_seed,
                spread=self._runner.spread.recent,
                user_scores=self._checks.user_scores,
                failures=tuple(
                    (msgspec.to_builtins(settings), msgspec.to_builtins(incumbent))
                    for settings, incumbent in self._ranking.failures
                ),
            )
        )

    async def rank_without_trials(self) -> RankedRungs:
        """Measure the baseline and predict every rung's gain, without applying anything."""
        await self._measure_baseline()
        self._runner.stage("Ranking", "predicting the gain of every rung")
        baseline, runs = self._running_baseline, self._running_baseline.runs
        forecasts = self._ranking.rank_without_trials(baseline)
        return RankedRungs(
            baseline=summarise_configuration(
                "baseline", baseline, runs, self._environment, self._job
            ),
            rate=baseline.rate,
            forecasts=tuple(forecasts),
            left_out=self._ranking.left_out,
            misfit=self._ranking.misfit,
        )

    def time_left_s(self) -> float:
        """Seconds that a start may take."""
        return self._budget.left_s - self._reserve_s

    def close(self) -> None:
        """Close every configuration that is still open."""
        self._stack.close()

    async def _measure_baseline(self) -> None:
        self._runner.stage("Baseline", self._environment.start_description)
        self._baseline, runs = await measure_baseline(
            self._job, self._budget, self._runner, self._checks, self._open
        )
        self._incumbent, settings = self._baseline, self._baseline.settings
        self._tried.add((settings, None))
        self._predictor.learn_steps(settings, self._steps_of(runs, settings))

    async def _try_defaults(self) -> None:
        """Try the defaults, whatever the simulator predicts for them."""
        defaults, incumbent = self._job.defaults, self._running_incumbent
        if any(trial.rung == DEFAULTS.id for trial in self._trials):
            return  # in the search that this one continues
        if defaults is None or changed_settings(defaults) == changed_settings(incumbent.settings):
            return
        candidate = defaults_candidate(defaults, incumbent.settings)
        if not self._budget.affords_trial():
            self._ranking.leave_out_defaults(self._predictor.unknown(candidate, ""))
            return
        await self._try(self._ranking.forecast_defaults(candidate, incumbent))

    async def _try_rungs(self) -> Ended:
        """Try the most promising rung until none is left or the time is used up."""
        while True:
            self._runner.stage("Ranking", "predicting the gain of every rung")
            promising = self._ranking.rank(self._running_incumbent, self._tried, self._trials)
            if not promising:
                return "no gain predicted" if self._budget.left_s > 0 else "budget spent"
            if not self._budget.affords_trial():
                self._ranking.leave_out_for_time(promising)
                return "budget spent"
            await self._try(promising[0])

    # ---- one trial -----------------------------------------------------------------------------

    async def _try(self, forecast: Forecast) -> None:
        """Open, check, measure, decide. Any failure becomes the outcome of this trial."""
        candidate = forecast.candidate
        self._tried.add((candidate.settings, candidate.make))
        evidence = TrialEvidence(forecast, begun_s=self._budget.spent_s)
        self._runner.stage(candidate.label, "opening it next to the incumbent")
        stack = ExitStack()
        self._reserve_s = self._budget.closing_cost_s
        try:
            candidate = evidence.use_candidate(self._quantise(candidate))
            deployment, stack = self._open(candidate.settings)
            configuration = await self._measure_candidate(candidate, deployment, stack, evidence)
        except Exception as error:  # a failing candidate must not end the search
            stack.close()
            configuration = None
            evidence.failed(error, error_line(error))
            if not isinstance(error, OpenFilesError | OutOfTimeError):  # not the candidate's fault
                self._ranking.learn_failure(candidate.settings, self._running_incumbent.settings)
        finally:
            self._reserve_s = 0.0
        trial = build_trial(evidence, self._environment, self._job, self._budget.spent_s)
        self._trials.append(trial)
        self._observer(trial_finished(trial))
        self._update_baseline(evidence)
        if trial.verdict == "kept" and configuration is not None:
            self._promote(configuration)
        else:
            stack.close()
            self._learn_from(trial)
            self._update_incumbent(evidence)
        self._save()

    def _quantise(self, candidate: RungCandidate) -> RungCandidate:
        """The candidate after quantising its weights, if it needs that."""
        if candidate.make is None:
            return candidate
        self._runner.report(f"quantising its weights ({candidate.make})")
        spare_s = self._budget.left_s - self._budget.closing_cost_s - self._budget.trial_cost_s
        settings = self._environment.make(candidate.settings, candidate.make, max(0.0, spare_s))
        return msgspec.structs.replace(candidate, settings=settings)

    async def _measure_candidate(
        self,
        candidate: RungCandidate,
        deployment: Deployment,
        stack: ExitStack,
        evidence: TrialEvidence,
    ) -> RunningConfiguration | None:
        """Measure the candidate; None if its tokens or the time ended the trial before."""
        incumbent = self._running_incumbent
        async with self._runner.in_time(self._reserve_s):
            if not await self._checks.outputs_agree(
                candidate.rung, incumbent.deployment, deployment, evidence
            ):
                return None
        fixed = self._job.objective == "latency"
        start = incumbent.rate * (1.0 if fixed else max(1.0, evidence.forecast.predicted_gain))
        # The load of one that held none was searched for in vain, and is not searched for again.
        is_known = incumbent.settled or not any(judged.holds for judged in incumbent.runs)
        evidence.comparison = comparison = await compare_in_rounds(
            self._runner,
            ComparisonSide(
                "incumbent",
                incumbent.deployment,
                incumbent.rate,
                fixed=fixed,
                settled=is_known,
            ),
            ComparisonSide(
                "candidate",
                deployment,
                start,
                fixed=fixed,
                like_rival=is_known and evidence.forecast.is_small,
            ),
            max_rounds=self._budget.max_rounds(len(self._trials)),
        )
        async with self._runner.in_time(self._reserve_s):
            await self._checks.finish_quality(incumbent.deployment, deployment, evidence)
        return RunningConfiguration(
            label=candidate.label,
            settings=candidate.settings,
            deployment=deployment,
            stack=stack,
            rate=comparison.after_rate,
            runs=comparison.after,
            settled=comparison.after_settled,
        )

    def _update_baseline(self, evidence: TrialEvidence) -> None:
        """Update the baseline's best load: rounds measure it better than the initial search."""
        comparison, baseline = evidence.comparison, self._running_baseline
        if comparison is None or comparison.ratio is None:
            return
        if self._running_incumbent.settings == baseline.settings:
            self._budget.note_baseline(comparison.before_rate)
            self._baseline = msgspec.structs.replace(
                baseline,
                rate=comparison.before_rate,
                runs=comparison.before,
                settled=comparison.before_settled,
            )

    def _promote(self, configuration: RunningConfiguration) -> None:
        """Make the candidate the incumbent and close the old one."""
        if self._trials[-1].honesty == "lossy":
            self._checks.freeze_references()
        self._running_incumbent.stack.close()
        self._incumbent = configuration
        steps = self._steps_of(configuration.runs, configuration.settings)
        self._predictor.learn_steps(configuration.settings, steps)
        self._learn_from(self._trials[-1])

    def _update_incumbent(self, evidence: TrialEvidence) -> None:
        """Keep the incumbent, with the figures of the latest rounds."""
        if evidence.comparison is not None and evidence.comparison.ratio is not None:
            self._incumbent = msgspec.structs.replace(
                self._running_incumbent,
                rate=evidence.comparison.before_rate,
                runs=evidence.comparison.before,
                settled=evidence.comparison.before_settled,
            )

    def _learn_from(self, trial: Trial) -> None:
        if trial.verdict == "quality failed" or (trial.verdict == "regressed" and not trial.ratio):
            self._predictor.learn_failure(trial.rung)
        if trial.ratio is not None:
            kept = trial.verdict == "kept"
            self._predictor.learn_trial(trial.rung, trial.predicted, trial.ratio.mid, kept=kept)

    # ---- the end -------------------------------------------------------------------------------

    async def _compare_with_baseline(self) -> PairedComparison | None:
        """Compare baseline and final configuration in alternation, if anything was kept."""
        baseline, final = self._running_baseline, self._running_incumbent
        if final.settings == baseline.settings:
            return None
        self._runner.stage("Closing", "comparing baseline and final configuration")
        fixed = self._job.objective == "latency"
        try:
            deployment, _ = self._open(baseline.settings)
            return await compare_in_rounds(
                self._runner,
                ComparisonSide("baseline", deployment, baseline.rate, fixed=fixed, settled=True),
                ComparisonSide("final", final.deployment, final.rate, fixed=fixed, settled=True),
                max_rounds=CLOSING_ROUNDS,
                closing=True,
            )
        except OutOfTimeError:
            return None
        except ServerCrashedError as error:
            self._runner.report(error_line(error))
            return None

    def _result(self, ended: Ended, closing: PairedComparison | None) -> LadderResult:
        if self._baseline is None or self._incumbent is None:
            raise InterruptedEarlyError("interrupted before the baseline was measured")
        before, after = self._baseline.runs, self._incumbent.runs
        if closing is not None and closing.before:
            before, after = closing.before, closing.after
        job, environment = self._job, self._environment
        first = summarise_configuration("baseline", self._baseline, before, environment, job)
        last = summarise_configuration("final", self._incumbent, after, environment, job)
        reverted = why_reverted(closing, last)
        account = SearchTotals(
            ended=ended,
            spent_s=self._budget.spent_s,
            window_s=self._budget.window_s,
            trial_cost_s=self._budget.trial_cost_s,
            closing_cost_s=self._budget.closing_cost_s,
            busy_share=self._busy_share(closing),
            trials=revert_kept(self._trials, reverted) if reverted else tuple(self._trials),
            not_tried=self._ranking.left_out,
            total=closing.ratio if closing else None,
            slo_holds=any(judged.holds for judged in (before if reverted else after)),
            reverted=reverted,
            rejected=last if reverted else None,
        )
        final = msgspec.structs.replace(first, label="final") if reverted else last
        return build_result(job, environment, account, first, final)

    def _busy_share(self, closing: PairedComparison | None) -> float | None:
        """The mean share of the CPU taken during the comparisons that it voided; None without."""
        shares = [trial.busy_share for trial in self._trials]
        shares.append(None if closing is None else closing.busy_share)
        busy = [share for share in shares if share is not None]
        return sum(busy) / len(busy) if busy else None

    # -- helpers

    @property
    def _running_incumbent(self) -> RunningConfiguration:
        assert self._incumbent is not None, "the baseline is measured first"
        return self._incumbent

    @property
    def _running_baseline(self) -> RunningConfiguration:
        assert self._baseline is not None, "the baseline is measured first"
        return self._baseline

    def _steps_of(self, runs: Sequence[JudgedRun], settings: Settings) -> list[StepStat]:
        return [
            step for judged in runs for step in self._environment.steps_of(judged.trace, settings)
        ]

    def _open(self, settings: Settings) -> tuple[Deployment, ExitStack]:
        """Open a configuration on its own exit stack; the search closes it at the latest."""
        begun_s = self._budget.spent_s
        stack = self._stack.enter_context(ExitStack())
        deployment = stack.enter_context(self._environment.open(settings))
        self._budget.note_open(self._budget.spent_s - begun_s)
        return deployment, stack


def trial_finished(trial: Trial) -> TrialFinished:
    """The event that reports a trial's verdict."""
    ratio = trial.ratio
    return TrialFinished(
        label=trial.label,
        verdict=trial.verdict,
        reason=trial.reason,
        ratio=None if ratio is None else (ratio.low, ratio.mid, ratio.high),
    )
