"""Predicts each rung's gain before anything is measured.

The simulator runs the engine's own scheduler on a virtual clock, with step times learnt from the
incumbent's measured steps. A rung's settings go in (and through them the spec's bytes and FLOPs),
the objective comes out. The prediction is the ratio candidate / incumbent, both simulated: model
error common to both cancels.

A prediction carries its error. It starts as an assumption (`FIRST_ERROR`) and becomes what the
tried rungs showed; a rung's own measured shortfall also applies to its other variants. A rung is
gain measuring while the upper end of its prediction is a gain: concluding from arithmetic that
INT8 will not pay is cheaper than a trial, but a wrong conclusion costs more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from ridgeline.config.settings import Settings
from ridgeline.errors import UserError
from ridgeline.optimize.comparison.objective import JudgedRun, Objective, judge_run
from ridgeline.optimize.comparison.outcome import MIN_GAIN
from ridgeline.optimize.environment import Load, Simulator
from ridgeline.optimize.ladder import RankingWeights, Rung, RungCandidate
from ridgeline.optimize.result import GainPrediction
from ridgeline.optimize.time_budget import REPORT_S, TimeBudget
from ridgeline.records import RunTrace, Slo, StepStat
from ridgeline.report.numbers import rounded

FIRST_ERROR = 0.20  # assumed standard error of log(measured / predicted)
MIN_ERROR = 0.05
CLEAR_GAIN = 0.10  # a larger predicted gain ranks before rungs not measured yet
UNSEEN = "the simulator does not model this change"
NEUTRAL = "the simulator finds that this changes nothing at this load"
UNITS: Mapping[Objective, str] = MappingProxyType(
    {
        "goodput": "requests/s within the SLO",
        "cost": "tokens/s within the SLO",
        "latency": "requests/s of one user",
    }
)
SCHEDULED = frozenset({"max_num_seqs", "max_num_batched_tokens"})
"""Settings of the scheduler, which the simulator runs itself: if its outcome does not change, the
limit is not reached."""
SEARCH_STEP = 1.5
STEP_GROWTH = 1.3  # of the exponent: a change that gains eightfold is found in four steps
MAX_PROBES = 6
BLOCK = 16  # prompt tokens that cost a simulation about as much as one output token
FINE_STEP, MAX_BISECTIONS = 1.05, 5  # width at which a bracket is narrow enough
MAX_REQUESTS = 400  # of a simulated run, where the ranking is the result
REQUEST_DURATIONS = 4.0  # least length of that run
QUEUE_TIMES = 10.0  # the same: a queue of 10 % more than is served reaches the TTFT limit
MAX_MISFIT = 2.0  # between simulated and measured objective, beyond which nothing is predicted
TIME_MARGIN = 2.0  # overloaded runs, which a search for the knee has too, take longer than others


class SimulationOverError(Exception):
    """No further run is simulated: it would end after the time for the predictions."""


class KneeBracket(NamedTuple):
    """The largest simulated load that met the SLO, and the smallest one that missed it."""

    held: float
    failed: float


class SimulatedWork(NamedTuple):
    """Runs, and the output tokens and prompt blocks in them, on which their time depends."""

    num_runs: int
    num_tokens: int


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate with its prediction, or with the `problem` for which it cannot run."""

    candidate: RungCandidate
    predicted: GainPrediction | None
    problem: str = ""

    @property
    def predicted_gain(self) -> float:
        """Predicted gain before the discount for risk and complexity; 0 without a prediction."""
        return self.predicted.gain if self.predicted else 0.0

    @property
    def is_small(self) -> bool:
        """Whether the prediction leaves the load that the candidate carries about the same."""
        return 1 / FINE_STEP <= self.predicted_gain <= FINE_STEP


class PredictorState(msgspec.Struct, frozen=True, kw_only=True):
    """What the tried rungs have shown about the predictions."""

    misses: tuple[float, ...] = ()
    of_rung: dict[str, float] = {}
    failed: tuple[str, ...] = ()


class Predictor:
    """Predicts candidates' gains with a simulator, trusting it as far as it has been right."""

    def __init__(
        self,
        simulator: Simulator,
        slo: Slo,
        objective: Objective,
        weights: RankingWeights,
        make_load: Callable[[float], Load],
    ) -> None:
        self._simulator, self._slo, self._objective = simulator, slo, objective
        self._weights, self._make_load = weights, make_load
        self._misses: list[float] = []
        self._of_rung: dict[str, float] = {}
        self._failed: set[str] = set()
        self._known: dict[Settings, float | str] = {}
        self._brackets: dict[Settings, KneeBracket] = {}
        self._searched: set[tuple[Settings, float]] = set()
        self._num_runs = self._num_tokens = 0
        self._budget: TimeBudget | None = None
        self._reserve_s = REPORT_S
        self._simulated_s = self._arrivals = 0.0

    def end_with(self, budget: TimeBudget, reserve_s: float = REPORT_S) -> None:
        """Begin no run that would not leave `reserve_s` of the budget, by the time that runs took
        so far.

        From then on predictions raise SimulationOverError if a run is missing.
        """
        self._budget, self._reserve_s = budget, reserve_s

    def limit_requests(self, runs: Sequence[JudgedRun]) -> None:
        """Simulate no more than `MAX_REQUESTS` per run, but several times as long as most requests
        of these runs take, and as the TTFT of the SLO, so that a queue can build up.
        """
        durations = [
            request.finished_s - request.scheduled_s
            for run in runs
            for request in run.trace.requests
            if request.finished_s is not None
        ]
        least_s = max(
            REQUEST_DURATIONS * (median(durations) if durations else 0.0),
            QUEUE_TIMES * (self._slo.ttft_s or 0.0),
        )
        make_load = self._make_load

        def make_shorter(rate: float) -> Load:
            load = make_load(rate)
            window_s = min(load.window_s, max(least_s, MAX_REQUESTS / rate))
            return msgspec.structs.replace(load, window_s=window_s)

        self._make_load = make_shorter

    @property
    def work(self) -> SimulatedWork:
        """What was simulated so far: other than time, no other program adds to it."""
        return SimulatedWork(self._num_runs, self._num_tokens)

    def learn_steps(self, settings: Settings, steps: Sequence[StepStat]) -> None:
        """Refit the simulator and drop everything simulated before."""
        if steps:
            self._simulator.learn(settings, steps)
            self._known.clear()
            self._brackets.clear()
            self._searched.clear()

    def learn_trial(
        self, rung: str, predicted: GainPrediction, measured: float, *, kept: bool = False
    ) -> None:
        """Record the error of a prediction, which also applies to the rung's other variants."""
        miss = math.log(measured / predicted.gain)
        self._misses.append(miss)
        # What was kept is in the incumbent, and with it the error: the ratio of two of its variants
        # does not have it.
        self._of_rung[rung] = 0.0 if kept else self._of_rung.get(rung, 0.0) + miss

    def learn_failure(self, rung: str) -> None:
        """One variant failed the quality gate: its siblings rank after everything else."""
        self._failed.add(rung)

    @property
    def state(self) -> PredictorState:
        """What to keep of an interrupted search, besides its steps."""
        return PredictorState(
            misses=tuple(self._misses),
            of_rung=dict(self._of_rung),
            failed=tuple(sorted(self._failed)),
        )

    def restore(self, state: PredictorState) -> None:
        """Continue with the errors of an interrupted search."""
        self._misses, self._of_rung = list(state.misses), dict(state.of_rung)
        self._failed = set(state.failed)

    def unknown(self, candidate: RungCandidate, note: str) -> Forecast:
        """A candidate that was not simulated: no gain is predicted and none excluded."""
        return Forecast(candidate=candidate, predicted=self._prediction(1.0, note))

    def _prediction(self, gain: float, note: str = "") -> GainPrediction:
        spread = math.exp(self.error)
        return GainPrediction(gain=gain, low=gain / spread, high=gain * spread, note=note)

    @property
    def error(self) -> float:
        """Root mean square of the prediction errors; the prior counts as two trials."""
        squares = [FIRST_ERROR**2] * 2 + [miss**2 for miss in self._misses]
        return max(MIN_ERROR, math.sqrt(sum(squares) / len(squares)))

    def forecast(self, incumbent: Settings, candidate: RungCandidate, rate: float) -> Forecast:
        """Simulate candidate and incumbent near the incumbent's best load."""
        before = self._score_incumbent(incumbent, rate)
        after = self.score(candidate.settings, rate, self._brackets.get(incumbent))
        if isinstance(before, str) or isinstance(after, str):
            problem = after if isinstance(after, str) else str(before)
            return Forecast(candidate=candidate, predicted=None, problem=problem)
        gain = after / before * math.exp(self._of_rung.get(candidate.rung.id, 0.0))
        note = ""
        if after == before:
            note = NEUTRAL if candidate.changes.keys() <= SCHEDULED else UNSEEN
        return Forecast(candidate=candidate, predicted=self._prediction(gain, note))

    def is_promising(self, forecast: Forecast) -> bool:
        """Whether the upper end of the prediction pays for the rung's risk and complexity.

        Once one variant was measured, its siblings are judged by their central prediction.
        """
        if forecast.predicted is None:
            return False
        rung, predicted = forecast.candidate.rung, forecast.predicted
        known = rung.id in self._of_rung or rung.id in self._failed
        best = predicted.gain if known else predicted.high
        return best / self._weights.discount(rung) > 1 + MIN_GAIN

    def rank_key(self, forecast: Forecast) -> tuple[int, float]:
        """Clear gains by size; then rungs not yet measured, of which those invisible to the
        simulator come last but for limits that it does not reach; then further variants of measured
        rungs.
        """
        rung, predicted = forecast.candidate.rung, forecast.predicted
        gain = forecast.predicted_gain / self._weights.discount(rung)
        if predicted is None or rung.id in self._of_rung or rung.id in self._failed:
            return (4 if gain > 1 + CLEAR_GAIN and rung.id not in self._failed else 0), gain
        if gain > 1 + CLEAR_GAIN:
            return 4, gain
        return {NEUTRAL: 1, "": 3}.get(predicted.note, 2), gain

    def why_not(self, forecast: Forecast) -> str:
        """The reason for leaving a rung out, with its arithmetic."""
        if forecast.predicted is None:
            return f"cannot run here: {forecast.problem}"
        rung, predicted = forecast.candidate.rung, forecast.predicted
        needed = self._weights.discount(rung) * (1 + MIN_GAIN)
        return (
            f"predicted {predicted.gain:.2f}x (at best {predicted.high:.2f}x), "
            f"but {_price(rung)} require {needed:.2f}x"
        )

    def score(
        self, settings: Settings, rate: float, near: KneeBracket | None = None
    ) -> float | str:
        """The simulated objective, or why it cannot be simulated.

        `near`: the bracket of a similar configuration, where the search for the knee starts.
        """
        if settings not in self._known:
            try:
                self._known[settings] = self._search(settings, rate, near)
            except UserError as error:
                self._known[settings] = str(error)
        return self._known[settings]

    def _score_incumbent(self, settings: Settings, rate: float) -> float | str:
        """The score of settings that carry `rate`, from a search that begins there.

        As a candidate they were searched from the load of the incumbent before them, and where they
        gained much that search may have ended below their knee: every other candidate would then
        seem to gain the rest.
        """
        if settings not in self._brackets and (settings, rate) not in self._searched:
            self._searched.add((settings, rate))
            self._known.pop(settings, None)
        return self.score(settings, rate)

    def misfit(self, settings: Settings, rate: float, measured: float) -> str:
        """Why the simulator may not rank changes of this configuration; "" if it may.

        `measured`: its objective near `rate`. Predictions are ratios, so that a common error
        cancels, but not one of more than `MAX_MISFIT`: something else than the simulated steps then
        limits the server, and a change of the steps would not move it.
        """
        simulated = self._score_incumbent(settings, rate)
        if isinstance(simulated, str) or not simulated > 0 or not measured > 0:
            return ""
        ratio = max(simulated / measured, measured / simulated)
        if ratio <= MAX_MISFIT:
            return ""
        which = "above" if simulated > measured else "below"
        return (
            f"the simulator is {ratio:.1f} times {which} what was measured "
            f"({rounded(simulated)} for {rounded(measured)} {UNITS[self._objective]}), and more "
            f"than {MAX_MISFIT:g} times shows that it does not know what limits this server"
        )

    def bracket_of(self, settings: Settings) -> KneeBracket | None:
        """Where the knee of simulated settings is; None if it was not found."""
        return self._brackets.get(settings)

    def _search(self, settings: Settings, rate: float, near: KneeBracket | None) -> float:
        """The score at the largest load that meets the SLO, or the lowest score if none does.

        Steps of `SEARCH_STEP` until the SLO flips, then bisection. Most changes move the knee
        little, so a search near a known bracket first runs its two ends.
        """
        if self._objective == "latency":
            return self._probe(settings, rate).score
        runs = [self._probe(settings, rate if near is None else near.held)]
        if near is not None and runs[0].holds:
            runs.append(self._probe(settings, near.failed))
        step = SEARCH_STEP if runs[0].holds else 1 / SEARCH_STEP
        while len(runs) < MAX_PROBES and runs[-1].holds == runs[0].holds:
            runs.append(self._probe(settings, runs[-1].rate * step))
            step **= STEP_GROWTH
        held = max((run.rate for run in runs if run.holds), default=0.0)
        failed = min((run.rate for run in runs if not run.holds), default=math.inf)
        for _ in range(MAX_BISECTIONS):
            if not 0 < FINE_STEP * held < failed < math.inf:
                break
            runs.append(self._probe(settings, math.sqrt(held * failed)))
            held, failed = (runs[-1].rate, failed) if runs[-1].holds else (held, runs[-1].rate)
        if not held:
            return min(run.score for run in runs)
        if failed < math.inf:
            self._brackets[settings] = KneeBracket(held, failed)
        return max(run.score for run in runs if run.holds and run.rate == held)

    def _probe(self, settings: Settings, rate: float) -> JudgedRun:
        load = self._make_load(rate)
        trace = self._run_in_time(settings, load)
        self._num_runs += 1
        self._num_tokens += sum(
            request.output_tokens + request.prompt_tokens // BLOCK for request in trace.requests
        )
        return judge_run(trace, load, self._slo, self._objective)

    def _run_in_time(self, settings: Settings, load: Load) -> RunTrace:
        """One simulated run. Raises SimulationOverError if the budget has no time for it."""
        if self._budget is None:
            return self._simulator.run(settings, load)
        arrivals, left_s = load.rate * load.window_s, self._budget.left_s - self._reserve_s
        known_s = self._simulated_s / self._arrivals if self._arrivals else 0.0
        if left_s <= TIME_MARGIN * known_s * arrivals:
            raise SimulationOverError
        trace = self._simulator.run(settings, load)
        self._simulated_s += left_s + self._reserve_s - self._budget.left_s
        self._arrivals += arrivals
        return trace


def _price(rung: Rung) -> str:
    levels = ("no", "low", "some", "high")
    return f"{levels[rung.risk]} risk and {levels[rung.complexity]} complexity"
