"""Which rungs to join, and whether the best point of their space is worth a trial."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ridgeline.config.settings import Settings
from ridgeline.optimize.comparison.outcome import MIN_GAIN
from ridgeline.optimize.job import RunningConfiguration
from ridgeline.optimize.ladder import Rung, RungCandidate
from ridgeline.optimize.ranking.joint_search import (
    JOINT,
    JOINT_LOSSY,
    Change,
    Dimension,
    JointPoint,
    JointSearch,
    dimension_of,
    is_worth_a_trial,
    joint_candidate,
)
from ridgeline.optimize.ranking.predictor import Forecast, Predictor
from ridgeline.optimize.result import Trial

SYNERGY = 1.25

Possible = Sequence[tuple[Rung, Sequence[RungCandidate]]]


class JointProposals:
    """Proposes candidates of several rungs. `excluded`: why settings must not be tried."""

    def __init__(
        self, predictor: Predictor, excluded: Callable[[Settings], str | None], seed: int
    ) -> None:
        self._predictor, self._excluded, self._seed = predictor, excluded, seed

    def propose(
        self,
        possible: Possible,
        promising: Sequence[Forecast],
        incumbent: RunningConfiguration,
        trials: Sequence[Trial],
        num_affordable: float,
        may_go_on: Callable[[], bool],
    ) -> list[Forecast]:
        """At most two: the best point, and the same point without its lossy parts.

        A rung that is tried alone shows what it is worth. So a point with switches is proposed only
        if more rungs gain than the budget affords trials (`num_affordable`), or if it gains
        `SYNERGY` times what its parts gain alone; one of numbers, which interact, always.
        Rungs that quantise weights first, those whose effect the simulator does not see, and those
        that held-out windows cannot judge are not joined: each needs a separate trial. A kind that
        failed once is not proposed again.
        """
        failed = {trial.rung for trial in trials if trial.verdict != "kept"}
        visible = {
            forecast.candidate.rung.id: forecast
            for forecast in promising
            if forecast.predicted is not None and not forecast.predicted.note
        }
        dimensions = [
            dimension
            for dimension in self._dimensions(possible, visible, incumbent.settings)
            if JOINT_LOSSY not in failed or dimension.rung.honesty == "exact"
        ]
        num_gains = sum(forecast.predicted_gain > 1 + MIN_GAIN for forecast in visible.values())
        # A change that is kept leaves the others to be tried again, so one more trial is needed.
        is_scarce = num_affordable < num_gains + 1
        if len(dimensions) < 2 or not visible or JOINT in failed:
            return []
        near = self._predictor.bracket_of(incumbent.settings)

        def score(settings: Settings) -> float | None:
            if self._excluded(settings) is not None:
                return None
            known = self._predictor.score(settings, incumbent.rate, near)
            return None if isinstance(known, str) else known

        search = JointSearch(dimensions, incumbent.settings, score, seed=self._seed)
        best = search.best(_first_points(dimensions, visible), may_go_on)
        points = [] if best is None else [best, search.only(best, "exact")]
        forecasts = [
            self._forecast(point, incumbent, visible)
            for point in points
            if point is not None and (is_scarce or self._has_synergy(point, incumbent, visible))
        ]
        unique = {f.candidate.settings: f for f in forecasts if f is not None}
        return list(unique.values())

    def _has_synergy(
        self, point: JointPoint, incumbent: RunningConfiguration, visible: Mapping[str, Forecast]
    ) -> bool:
        """Whether a point gains more than its parts would one after another, or is of numbers."""
        if all(dimension.number is not None for dimension, _ in point.parts):
            return True
        before = self._predictor.score(incumbent.settings, incumbent.rate)
        if isinstance(before, str):
            return False
        singles = [
            max(1.0, visible[dimension.rung.id].predicted_gain)
            for dimension, _ in point.parts
            if dimension.rung.id in visible
        ]
        return point.score > SYNERGY * math.prod(singles) * before

    def _forecast(
        self, point: JointPoint, incumbent: RunningConfiguration, visible: Mapping[str, Forecast]
    ) -> Forecast | None:
        """The forecast of a point, if several parts of it gain more than the best rung alone."""
        if not point.parts:
            return None
        candidate = joint_candidate(point, incumbent.settings)
        singles = [
            self._predictor.score(forecast.candidate.settings, incumbent.rate)
            for forecast in visible.values()
            if candidate.rung.honesty == "lossy" or forecast.candidate.rung.honesty == "exact"
        ]
        best_single = max((s for s in singles if not isinstance(s, str)), default=0.0)
        if not is_worth_a_trial(point, best_single):
            return None
        forecast = self._predictor.forecast(incumbent.settings, candidate, incumbent.rate)
        return forecast if self._predictor.is_promising(forecast) else None

    @staticmethod
    def _dimensions(
        possible: Possible, visible: Mapping[str, Forecast], incumbent: Settings
    ) -> list[Dimension]:
        """Exact rungs that change a number, and others that are predicted to gain."""
        dimensions = []
        for rung, options in possible:
            if any(option.make is not None for option in options) or "text" not in rung.gate:
                continue
            dimension = dimension_of(rung, options, incumbent)
            gains = rung.id in visible and visible[rung.id].predicted_gain > 1 + MIN_GAIN
            if gains or (dimension.number is not None and rung.honesty == "exact"):
                dimensions.append(dimension)
        return dimensions


def _first_points(
    dimensions: Sequence[Dimension], visible: Mapping[str, Forecast]
) -> list[dict[str, Change]]:
    """All rungs that gain, each by its best variant, and the same without the lossy ones."""
    best, exact = {}, {}
    for dimension in dimensions:
        forecast = visible.get(dimension.rung.id)
        if forecast is None or forecast.predicted_gain <= 1:
            continue
        best[dimension.rung.id] = change = dimension.change_of(forecast.candidate)
        if dimension.rung.honesty == "exact":
            exact[dimension.rung.id] = change
    return [best, exact] if exact != best else [best]
