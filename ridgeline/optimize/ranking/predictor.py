"""What each rung promises, before anything is measured.

The simulator runs the engine's own scheduler on a virtual clock with step times learnt from the
incumbent's measured steps; a rung's settings (and through them the spec's bytes and FLOPs) go in,
the objective comes out. The promise is the ratio candidate / incumbent, both simulated: what the
model gets wrong about both cancels.

A prediction carries its error. At first that is a guess (`FIRST_ERROR`); afterwards it is what
the tried rungs showed, and a rung's own measured shortfall is remembered for its other variants.
A rung is worth measuring while the *upper* end of its prediction promises something: saying from
arithmetic alone that INT8 will not pay is cheaper than a trial, and saying so wrongly is dearer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from ridgeline.config.settings import Settings
from ridgeline.errors import UserError
from ridgeline.optimize.comparison.objective import JudgedRun, Objective, judge_run
from ridgeline.optimize.comparison.outcome import LEAST_GAIN
from ridgeline.optimize.environment import Load, Simulator
from ridgeline.optimize.ladder import RankingWeights, Rung, RungCandidate
from ridgeline.optimize.result import GainPrediction
from ridgeline.records import Slo, StepStat

FIRST_ERROR = 0.20  # standard error of log(measured / predicted) before anything is known
LEAST_ERROR = 0.05
CLEAR_GAIN = 0.10  # a promise beyond this goes before a rung that was not measured yet
UNSEEN = "the simulator does not see this change"
SEARCH_STEP = 1.5
MAX_PROBES = 6  # a promise beyond SEARCH_STEP^5 = 7.6x is ranked first in any case
BISECTIONS = 2


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate with its promise; `problem` instead where the simulator says it cannot run."""

    candidate: RungCandidate
    predicted: GainPrediction | None
    problem: str = ""

    @property
    def worth(self) -> float:
        """Predicted gain, discounted by risk and complexity: what candidates are ranked by."""
        return self.predicted.gain if self.predicted else 0.0


class Predictor:
    """Ranks candidates with a simulator that it trusts as far as it has been right."""

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

    def learn_steps(self, settings: Settings, steps: Sequence[StepStat]) -> None:
        """Refit: everything that was simulated before is forgotten."""
        if steps:
            self._simulator.learn(settings, steps)
            self._known.clear()

    def learn_trial(self, rung: str, predicted: GainPrediction, measured: float) -> None:
        """How wrong a promise was."""
        miss = math.log(measured / predicted.gain)
        self._misses.append(miss)
        self._of_rung[rung] = self._of_rung.get(rung, 0.0) + miss

    def learn_failure(self, rung: str) -> None:
        """One variant broke the quality gate: the others come after everything else."""
        self._failed.add(rung)

    def unknown(self, candidate: RungCandidate, note: str) -> Forecast:
        """A candidate of which nothing could be simulated: no gain is promised, none excluded."""
        return Forecast(candidate=candidate, predicted=self._prediction(1.0, note))

    def _prediction(self, gain: float, note: str = "") -> GainPrediction:
        spread = math.exp(self.error)
        return GainPrediction(gain=gain, low=gain / spread, high=gain * spread, note=note)

    @property
    def error(self) -> float:
        """Root mean square of what was missed so far; the first guess counts as two trials."""
        squares = [FIRST_ERROR**2] * 2 + [miss**2 for miss in self._misses]
        return max(LEAST_ERROR, math.sqrt(sum(squares) / len(squares)))

    def forecast(self, incumbent: Settings, candidate: RungCandidate, rate: float) -> Forecast:
        """Simulate both near the incumbent's best load."""
        before, after = self._score(incumbent, rate), self._score(candidate.settings, rate)
        if isinstance(before, str) or isinstance(after, str):
            problem = after if isinstance(after, str) else str(before)
            return Forecast(candidate=candidate, predicted=None, problem=problem)
        gain = after / before * math.exp(self._of_rung.get(candidate.rung.id, 0.0))
        note = UNSEEN if after == before else ""
        return Forecast(candidate=candidate, predicted=self._prediction(gain, note))

    def promises(self, forecast: Forecast) -> bool:
        """Whether the upper end of the prediction pays for the rung's risk and complexity.

        A rung of which one variant was measured has had the benefit of the doubt already.
        """
        if forecast.predicted is None:
            return False
        rung, predicted = forecast.candidate.rung, forecast.predicted
        known = rung.id in self._of_rung or rung.id in self._failed
        best = predicted.gain if known else predicted.high
        return best / self._weights.discount(rung) > 1 + LEAST_GAIN

    def rank_key(self, forecast: Forecast) -> tuple[int, float]:
        """Clear promises by size; then rungs not measured yet, those of which the simulator saw
        nothing last; then more of the same rungs.
        """
        rung, predicted = forecast.candidate.rung, forecast.predicted
        worth = forecast.worth / self._weights.discount(rung)
        if predicted is None or rung.id in self._of_rung or rung.id in self._failed:
            return (3 if worth > 1 + CLEAR_GAIN and rung.id not in self._failed else 0), worth
        if worth > 1 + CLEAR_GAIN:
            return 3, worth
        return (1 if predicted.note else 2), worth

    def why_not(self, forecast: Forecast) -> str:
        """The reason for leaving a rung out, with the arithmetic."""
        if forecast.predicted is None:
            return f"cannot run here: {forecast.problem}"
        rung, predicted = forecast.candidate.rung, forecast.predicted
        needed = self._weights.discount(rung) * (1 + LEAST_GAIN)
        return (
            f"predicted {predicted.gain:.2f}x (at best {predicted.high:.2f}x), "
            f"and {_price(rung)} asks for {needed:.2f}x"
        )

    def _score(self, settings: Settings, rate: float) -> float | str:
        """The objective in simulation, or why it cannot be had."""
        if settings not in self._known:
            try:
                self._known[settings] = self._search(settings, rate)
            except UserError as error:
                self._known[settings] = str(error)
        return self._known[settings]

    def _search(self, settings: Settings, rate: float) -> float:
        """The best score over loads: steps of `SEARCH_STEP` until one flips, then bisected."""
        if self._objective == "latency":
            return self._probe(settings, rate).score
        readings = [self._probe(settings, rate)]
        step = SEARCH_STEP if readings[0].holds else 1 / SEARCH_STEP
        while len(readings) < MAX_PROBES and readings[-1].holds == readings[0].holds:
            rate *= step
            readings.append(self._probe(settings, rate))
        for _ in range(BISECTIONS):
            held = max((r.rate for r in readings if r.holds), default=rate / SEARCH_STEP)
            failed = min((r.rate for r in readings if not r.holds), default=rate * SEARCH_STEP)
            readings.append(self._probe(settings, math.sqrt(held * failed)))
        held_scores = [reading.score for reading in readings if reading.holds]
        return max(held_scores, default=min(reading.score for reading in readings))

    def _probe(self, settings: Settings, rate: float) -> JudgedRun:
        load = self._make_load(rate)
        return judge_run(self._simulator.run(settings, load), load, self._slo, self._objective)


def _price(rung: Rung) -> str:
    levels = ("no", "low", "some", "high")
    return f"{levels[rung.risk]} risk and {levels[rung.complexity]} complexity"
