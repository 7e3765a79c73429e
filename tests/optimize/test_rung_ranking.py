"""The ranking of rungs within its time limit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from ridgeline.config.settings import Settings
from ridgeline.optimize.ladder import candidates_of, load_default_ladder
from ridgeline.optimize.ranking.predictor import Forecast, Predictor
from ridgeline.optimize.ranking.rung_ranking import Ranking


def test_a_rung_that_cannot_run_keeps_its_reason_when_the_time_limit_is_reached() -> None:
    budget = SimpleNamespace(spent_s=10.0)
    ranking = Ranking(*cast("list[Any]", [None, None, None, None, budget]))
    rung, option = cast("Any", SimpleNamespace(id="int8")), cast("Any", SimpleNamespace(label="a"))
    ranking._last["int8"] = Forecast(candidate=option, predicted=None, problem="no INT8 kernels")
    later = ranking._best(rung, [option], cast("Any", None), 5.0)
    assert later is not None and later.problem == "no INT8 kernels"


def test_variant_without_a_predicted_change_is_tried_before_one_that_loses() -> None:
    """Four slots: two are predicted to lose, and more are predicted to change nothing."""
    ladder, start = load_default_ladder(), Settings(model="demo", max_num_seqs=4)
    rung = next(rung for rung in ladder.rungs if rung.id == "batch-limit")
    options = list(candidates_of(rung, start, {}))
    nothing = cast("Any", None)
    predictor = Predictor(nothing, nothing, "goodput", ladder.weights, nothing)
    predictor._known = {start: 1.0} | {
        option.settings: 0.83 if option.settings.max_num_seqs == 2 else 1.0 for option in options
    }
    budget = SimpleNamespace(spent_s=0.0)
    ranking = Ranking(*cast("list[Any]", [None, None, ladder, predictor, budget]))
    best = ranking._best(rung, options, cast("Any", SimpleNamespace(settings=start, rate=1.0)), 5.0)
    assert best is not None and best.candidate.settings.max_num_seqs == 8
    assert predictor.is_promising(best)


def test_variant_does_not_inherit_the_prediction_of_another_one() -> None:
    ladder, start = load_default_ladder(), Settings(model="demo", max_num_seqs=8)
    rung = next(rung for rung in ladder.rungs if rung.id == "batch-limit")
    options = list(candidates_of(rung, start, {}))
    nothing, budget = cast("Any", None), SimpleNamespace(spent_s=10.0)
    predictor = Predictor(nothing, nothing, "goodput", ladder.weights, nothing)
    ranking = Ranking(*cast("list[Any]", [None, None, ladder, predictor, budget]))
    tried = Forecast(candidate=options[2], predicted=predictor._prediction(3.7))
    ranking._last[rung.id] = tried
    later = ranking._best(rung, [options[0], *options[3:]], nothing, 5.0)
    assert later is not None and later.predicted_gain == 1.0
    same = ranking._best(rung, options, nothing, 5.0)
    assert same is not None and same.candidate == options[2]
