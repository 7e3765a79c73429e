"""Which rung to try next, and why the others are left out, within a limit of simulated runs.

Simulating every rung's variants is cheaper than one trial but not free: at high loads a simulated
run takes a noticeable part of a measured one. So each ranking has a limit. It counts runs rather
than seconds, so that a busy machine ranks as an idle one does. Rungs are simulated in the order of
their last prediction (new ones first); those not reached keep their last prediction, and without
one they rank behind all others. A ranking that is the result also ends with the budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set

import msgspec

from ridgeline.config.settings import Settings
from ridgeline.optimize.environment import Environment
from ridgeline.optimize.job import OptimizeJob, RunningConfiguration
from ridgeline.optimize.ladder import Ladder, Rung, RungCandidate, candidates_of, unmet_need
from ridgeline.optimize.playbook import place_of
from ridgeline.optimize.ranking.failure_bounds import FailureBounds
from ridgeline.optimize.ranking.joint_proposals import JointProposals
from ridgeline.optimize.ranking.predictor import Forecast, Predictor, SimulationOverError
from ridgeline.optimize.result import ConfigurationSummary, NotTried, Trial
from ridgeline.optimize.result_builder import collect_facts
from ridgeline.optimize.time_budget import TimeBudget

RUNS_PER_RANKING = 120  # simulated runs before the rest keep their last prediction
RUNS_WITHOUT_TRIALS = 400  # of a ranking that is the result: it has to reach every rung
TOKENS_WITHOUT_TRIALS = 5e6  # output tokens and prompt blocks of that ranking
MAX_SHARE = 0.1  # share of the budget that a ranking may take on a slow machine
CLEAR_LOSS = 0.9  # a rung predicted to lose as much is simulated again for another incumbent only
JOINT_SHARE = 0.5  # additional runs for joint candidates, as a share of the ranking's
SCARCE_TRIALS = 3.0  # with fewer left, several changes are tried together first
Tried = Set[tuple[Settings, str | None]]


class RankedRungs(msgspec.Struct, frozen=True, kw_only=True):
    """A measured baseline, its best load (requests/s), and the rungs by their predicted gain.

    `misfit`: why no gain is predicted, if the simulated baseline is too far from the measured one.
    """

    baseline: ConfigurationSummary
    rate: float
    forecasts: tuple[Forecast, ...]
    left_out: tuple[NotTried, ...]
    misfit: str = ""


class WorkLimit:
    """Ends a ranking after a number of simulated runs or output tokens, or after a time."""

    def __init__(self, predictor: Predictor, num_runs: int, num_tokens: float = math.inf) -> None:
        self._predictor, self._begun = predictor, predictor.work
        self._num_runs, self._num_tokens = float(num_runs), num_tokens
        self._stop_s = math.inf
        self._budget: TimeBudget | None = None
        self._refused = ""
        self.is_late = False

    def end_now(self) -> None:
        """End, because the budget has no time for another run."""
        self.is_late = True

    def refuse(self, reason: str) -> None:
        """Simulate nothing."""
        self._refused = reason

    def end_in(self, seconds: float, budget: TimeBudget) -> None:
        """End after this time of the budget as well."""
        self._stop_s, self._budget = budget.spent_s + seconds, budget

    def extend(self, share: float) -> None:
        """Allow this share of the work in addition."""
        self._num_runs *= 1 + share
        self._num_tokens *= 1 + share

    @property
    def why_over(self) -> str:
        """Why nothing more is simulated; "" while something may be."""
        if self._refused:
            return self._refused
        work = self._predictor.work
        if work.num_runs - self._begun.num_runs >= self._num_runs:
            return f"a ranking ends after {self._num_runs:,.0f} simulated runs"
        if work.num_tokens - self._begun.num_tokens >= self._num_tokens:
            return f"a ranking ends after {self._num_tokens:,.0f} simulated tokens"
        is_over = self._budget is not None and self._budget.spent_s >= self._stop_s
        if is_over or self.is_late:
            return "the budget left no time to simulate it"
        return ""


class Ranking:
    """The rungs in order, and the reasons for those left out."""

    def __init__(
        self,
        job: OptimizeJob,
        environment: Environment,
        ladder: Ladder,
        predictor: Predictor,
        budget: TimeBudget,
    ) -> None:
        self._job, self._environment, self._ladder = job, environment, ladder
        self._predictor, self._budget = predictor, budget
        self._last: dict[str, Forecast] = {}
        self._ranked_for: dict[str, Settings] = {}  # incumbent of the last forecast, by rung
        self._left_out: dict[str, NotTried] = {}
        self._defaults_left_out: tuple[NotTried, ...] = ()
        self._promising: dict[str, str] = {}  # title → rung
        self._trials: Sequence[Trial] = ()
        self._references_lost = False
        self.misfit = ""
        """Why nothing was predicted: the simulation does not fit what was measured."""
        self._bounds = FailureBounds()
        self._joint = JointProposals(
            predictor, self._bounds.excludes, 0 if job is None else job.seed
        )

    def learn_failure(self, settings: Settings, incumbent: Settings) -> None:
        """A trial did not start or crashed: nothing as large is tried again."""
        self._bounds.learn(settings, incumbent)

    @property
    def failures(self) -> tuple[tuple[Settings, Settings], ...]:
        """What failed trials taught: settings that failed, and the incumbent of that time."""
        return self._bounds.learnt

    def restore_failures(self, failures: Sequence[tuple[Settings, Settings]]) -> None:
        """Continue with the failures of an interrupted search."""
        self._bounds.restore(failures)

    def forget_references(self) -> None:
        """The baseline's distributions were lost after a lossy rung was kept: no further one can be
        compared with them.
        """
        self._references_lost = True

    def rank(
        self, incumbent: RunningConfiguration, tried: Tried, trials: Sequence[Trial]
    ) -> list[Forecast]:
        """The promising rungs, each represented by its best variant, most promising first."""
        budget, reserve_s = self._budget, self._budget.trial_cost_s + self._budget.closing_cost_s
        spare_s = budget.left_s - reserve_s
        self._predictor.end_with(budget, reserve_s)
        limit = WorkLimit(self._predictor, RUNS_PER_RANKING)
        limit.end_in(min(MAX_SHARE * budget.total_s, max(0.0, spare_s)), budget)
        num_affordable = spare_s / budget.trial_cost_s + 1
        return self._rank(incumbent, tried, trials, limit, num_affordable)

    def rank_without_trials(self, incumbent: RunningConfiguration) -> list[Forecast]:
        """The same where no trial follows: the ranking is the result, and all of the time left may
        go into it. What there was no time to simulate is left out, with that reason.
        """
        limit = WorkLimit(self._predictor, RUNS_WITHOUT_TRIALS, TOKENS_WITHOUT_TRIALS)
        self._predictor.end_with(self._budget)
        self._predictor.limit_requests(incumbent.runs)
        self.misfit = self._misfit(incumbent)
        if self.misfit:
            limit.refuse("its simulation does not fit what was measured")
        return self._rank(incumbent, frozenset(), (), limit, math.inf)

    def _misfit(self, incumbent: RunningConfiguration) -> str:
        if not incumbent.settled:
            return ""  # it may carry more than was measured
        measured = max((run.score for run in incumbent.runs if run.holds), default=0.0)
        try:
            return self._predictor.misfit(incumbent.settings, incumbent.rate, measured)
        except SimulationOverError:
            return ""

    def _rank(
        self,
        incumbent: RunningConfiguration,
        tried: Tried,
        trials: Sequence[Trial],
        limit: WorkLimit,
        num_affordable: float,
    ) -> list[Forecast]:
        self._left_out.clear()
        self._trials = trials
        possible = self._possible(incumbent, tried)
        best = [self._best(rung, options, incumbent, limit) for rung, options in possible]
        for forecast in best:
            if not self._predictor.is_promising(forecast):
                self._leave_out_forecast(forecast, self._predictor.why_not(forecast))
        promising = [forecast for forecast in best if self._predictor.is_promising(forecast)]
        self._promising = {f.candidate.rung.title: f.candidate.rung.id for f in promising}
        limit.extend(JOINT_SHARE)
        joint = self._propose_joint(possible, promising, incumbent, limit, num_affordable)
        is_scarce = num_affordable < SCARCE_TRIALS

        def key(forecast: Forecast) -> tuple[int, bool, int, bool, float]:
            """How certain the gain is; joint changes, if few trials are left; the playbook's
            order; exact changes, which risk no quality; the size of the gain."""
            certainty, gain = self._predictor.rank_key(forecast)
            rung = forecast.candidate.rung
            is_exact = rung.honesty == "exact"
            place = -place_of(rung.id, self._ladder.first)
            return certainty, is_scarce and forecast in joint, place, is_exact, gain

        return sorted([*promising, *joint], key=key, reverse=True)

    def _propose_joint(
        self,
        possible: Sequence[tuple[Rung, Sequence[RungCandidate]]],
        promising: Sequence[Forecast],
        incumbent: RunningConfiguration,
        limit: WorkLimit,
        num_affordable: float,
    ) -> list[Forecast]:
        """Several changes together; none if there is no time to simulate them."""
        if limit.is_late:
            return []
        try:
            return self._joint.propose(
                possible,
                promising,
                incumbent,
                self._trials,
                num_affordable,
                lambda: not limit.why_over,
            )
        except SimulationOverError:
            limit.end_now()
            return []

    def _possible(
        self, incumbent: RunningConfiguration, tried: Tried
    ) -> list[tuple[Rung, list[RungCandidate]]]:
        """Rungs whose needs are met, with their untried variants; best known first."""
        info, settings = incumbent.deployment.info, incumbent.settings
        facts = collect_facts(info, incumbent.runs, settings, self._environment, self._job.slo)
        possible: list[tuple[Rung, list[RungCandidate]]] = []
        offered = set(tried)  # what two rungs would change alike is offered by the first
        for rung in self._ladder.rungs:
            if reason := unmet_need(rung, facts) or self._unprovable(rung):
                self._leave_out(rung.id, rung.title, reason)
                continue
            options = [
                option
                for option in candidates_of(rung, settings, info.settings)
                if (option.settings, option.make) not in offered
            ]
            offered |= {(option.settings, option.make) for option in options}
            fitting = [o for o in options if self._bounds.excludes(o.settings) is None]
            if fitting:
                possible.append((rung, fitting))
            elif options:
                self._leave_out(
                    rung.id, rung.title, str(self._bounds.excludes(options[0].settings))
                )
        return sorted(possible, key=lambda pair: self._last_predicted_gain(pair[0]), reverse=True)

    def _last_predicted_gain(self, rung: Rung) -> float:
        last = self._last.get(rung.id)
        return float("inf") if last is None else last.predicted_gain

    def _best(
        self,
        rung: Rung,
        options: Sequence[RungCandidate],
        incumbent: RunningConfiguration,
        limit: WorkLimit,
    ) -> Forecast:
        last = self._last.get(rung.id)
        lost = last is not None and last.predicted is not None and last.predicted.gain < CLEAR_LOSS
        if lost and self._ranked_for.get(rung.id) == incumbent.settings:
            known = self._last_forecast(rung, options)
            if known is not None:
                return known
        forecasts: list[Forecast] = []
        for option in options:
            if limit.why_over:
                break
            try:
                forecast = self._predictor.forecast(incumbent.settings, option, incumbent.rate)
            except SimulationOverError:
                limit.end_now()
                break
            forecasts.append(forecast)
        if not forecasts:
            return self._last_forecast(rung, options) or self._predictor.unknown(
                options[0], f"not ranked: {limit.why_over}"
            )
        self._ranked_for[rung.id] = incumbent.settings
        predictor = self._predictor
        # A variant that the simulator does not see is still better than a predicted loss.
        self._last[rung.id] = best = max(
            forecasts, key=lambda f: (predictor.is_promising(f), *predictor.rank_key(f))
        )
        return best

    def _last_forecast(self, rung: Rung, options: Sequence[RungCandidate]) -> Forecast | None:
        """The last prediction, of a variant that is still untried; None without one."""
        last = self._last.get(rung.id)
        if last is None:
            return None
        like = [option for option in options if option.label == last.candidate.label]
        return msgspec.structs.replace(last, candidate=like[0]) if like else None

    def _unprovable(self, rung: Rung) -> str | None:
        if rung.honesty == "exact":
            return None
        if self._references_lost:
            return "lossy, and the search was resumed after a lossy rung had been kept"
        if "text" not in rung.gate and self._environment.long_contexts is None:
            return "lossy, and long contexts, which alone show what it loses, cannot be asked here"
        if self._environment.judges_quality:
            return None
        return (
            "lossy, and its quality cannot be verified: the server returns no log-probabilities, "
            "or the model has no tokenizer for the held-out text; --eval-cmd would judge it"
        )

    # ---- what is left out ----------------------------------------------------------------------

    @property
    def left_out(self) -> tuple[NotTried, ...]:
        """Each change once, though several rungs may describe it; not what another rung offers."""
        rows = (*self._defaults_left_out, *self._left_out.values())
        offered = self._promising
        return distinct(row for row in rows if offered.get(row.label, row.rung) == row.rung)

    def forecast_defaults(
        self, candidate: RungCandidate, incumbent: RunningConfiguration
    ) -> Forecast:
        """A prediction of the settings as shipped, which are tried whatever it is."""
        budget = self._budget
        self._predictor.end_with(budget, budget.trial_cost_s + budget.closing_cost_s)
        try:
            forecast = self._predictor.forecast(incumbent.settings, candidate, incumbent.rate)
        except SimulationOverError:
            return self._predictor.unknown(candidate, "there was no time to simulate it")
        if forecast.predicted is None:
            return self._predictor.unknown(candidate, forecast.problem)
        return forecast

    def leave_out_defaults(self, forecast: Forecast) -> None:
        """Record that there was no time to try the settings as shipped."""
        self.leave_out_for_time([forecast])
        self._defaults_left_out = (self._left_out.pop(forecast.candidate.rung.id),)

    def leave_out_for_time(self, promising: Sequence[Forecast]) -> None:
        """Record that the budget ended before these were tried."""
        needed_s, left_s = self._budget.trial_cost_s, self._budget.left_s
        reason = (
            f"the budget ended: a trial takes about {needed_s:.0f} s; of the remaining "
            f"{left_s:.0f} s {self._budget.closing_cost_s:.0f} s are reserved for the closing "
            "comparison"
        )
        for forecast in promising:
            self._leave_out_forecast(forecast, reason)

    def _leave_out(self, rung: str, label: str, reason: str) -> None:
        if all(trial.rung != rung for trial in self._trials):
            self._left_out[rung] = NotTried(rung=rung, label=label, reason=reason)

    def _leave_out_forecast(self, forecast: Forecast, reason: str) -> None:
        rung = forecast.candidate.rung
        self._left_out[rung.id] = NotTried(
            rung=rung.id,
            label=forecast.candidate.label,
            reason=reason,
            predicted=forecast.predicted,
        )


def distinct(rows: Iterable[NotTried]) -> tuple[NotTried, ...]:
    """One row for each label, with the reasons of all; a prediction is kept."""
    merged: dict[str, NotTried] = {}
    for row in rows:
        first = merged.setdefault(row.label, row)
        if row.reason not in first.reason:
            first = msgspec.structs.replace(first, reason=f"{first.reason}; {row.reason}")
        merged[row.label] = msgspec.structs.replace(
            first, predicted=first.predicted or row.predicted
        )
    return tuple(merged.values())
