"""The ranking of rungs within its time limit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from ridgeline.optimize.ranking.predictor import Forecast
from ridgeline.optimize.ranking.rung_ranking import Ranking


def test_a_rung_that_cannot_run_keeps_its_reason_when_the_time_limit_is_reached() -> None:
    budget = SimpleNamespace(spent_s=10.0)
    ranking = Ranking(*cast("list[Any]", [None, None, None, None, budget]))
    rung, option = cast("Any", SimpleNamespace(id="int8")), cast("Any", SimpleNamespace(label="a"))
    ranking._last["int8"] = Forecast(candidate=option, predicted=None, problem="no INT8 kernels")
    later = ranking._best(rung, [option], cast("Any", None), 5.0)
    assert later is not None and later.problem == "no INT8 kernels"
