"""The ranking of rungs within its limit of simulated runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from ridgeline.config.settings import Settings
from ridgeline.optimize.environment import Load
from ridgeline.optimize.ladder import RungCandidate, candidates_of, load_default_ladder
from ridgeline.optimize.ranking import rung_ranking
from ridgeline.optimize.ranking.predictor import Forecast, Predictor
from ridgeline.optimize.ranking.rung_ranking import Ranking, WorkLimit, distinct
from ridgeline.optimize.result import NotTried
from ridgeline.records import RequestTrace, RunTrace, Slo

OVER = cast("Any", SimpleNamespace(why_over="a ranking ends after 5 simulated runs"))
NOT_OVER = cast("Any", SimpleNamespace(why_over=""))


def test_a_rung_that_cannot_run_keeps_its_reason_when_the_limit_is_reached() -> None:
    ranking = Ranking(*cast("list[Any]", [None, None, None, None, None]))
    rung, option = cast("Any", SimpleNamespace(id="int8")), cast("Any", SimpleNamespace(label="a"))
    ranking._last["int8"] = Forecast(candidate=option, predicted=None, problem="no INT8 kernels")
    later = ranking._best(rung, [option], cast("Any", None), OVER)
    assert later.problem == "no INT8 kernels"


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
    predictor._searched.add((start, 1.0))
    ranking = Ranking(*cast("list[Any]", [None, None, ladder, predictor, None]))
    incumbent = cast("Any", SimpleNamespace(settings=start, rate=1.0))
    best = ranking._best(rung, options, incumbent, NOT_OVER)
    assert best.candidate.settings.max_num_seqs == 8
    assert predictor.is_promising(best)


def test_variant_does_not_inherit_the_prediction_of_another_one() -> None:
    ladder, start = load_default_ladder(), Settings(model="demo", max_num_seqs=8)
    rung = next(rung for rung in ladder.rungs if rung.id == "batch-limit")
    options = list(candidates_of(rung, start, {}))
    nothing = cast("Any", None)
    predictor = Predictor(nothing, nothing, "goodput", ladder.weights, nothing)
    ranking = Ranking(*cast("list[Any]", [None, None, ladder, predictor, None]))
    tried = Forecast(candidate=options[2], predicted=predictor._prediction(3.7))
    ranking._last[rung.id] = tried
    later = ranking._best(rung, [options[0], *options[3:]], nothing, OVER)
    assert later.predicted is not None and later.predicted.gain == 1.0
    assert later.predicted.note == "not ranked: a ranking ends after 5 simulated runs"
    same = ranking._best(rung, options, nothing, OVER)
    assert same.candidate == options[2]


class KneeSimulator:
    """Serves every request in 10 ms up to the knee of its settings, and in a minute beyond it."""

    def __init__(self, knees: dict[int, float]) -> None:
        self.knees, self.runs = knees, list[tuple[int, float]]()

    def learn(self, settings: Settings, steps: object) -> None: ...

    def run(self, settings: Settings, load: Load) -> RunTrace:
        slots = settings.max_num_seqs or 0
        self.runs.append((slots, load.rate))
        took_s = 0.01 if load.rate <= self.knees[slots] else 60.0
        requests = tuple(
            RequestTrace(
                id=str(i),
                kind="x",
                scheduled_s=at_s,
                sent_s=at_s,
                started_s=at_s,
                token_s=(at_s + took_s,),
                token_counts=(1,),
                finished_s=at_s + took_s,
                prompt_tokens=1,
                cached_tokens=0,
                output_tokens=1,
                requested_tokens=1,
                finish_reason="length",
            )
            for i, at_s in enumerate(n / load.rate for n in range(max(1, int(10 * load.rate))))
        )
        return RunTrace(
            target="t",
            workload="w",
            arrivals="even",
            seed=0,
            started_unix_s=0.0,
            duration_s=10.0,
            requests=requests,
        )


def knee_predictor(simulator: KneeSimulator) -> Predictor:
    return Predictor(
        simulator,
        Slo.parse("ttft:500"),
        "goodput",
        load_default_ladder().weights,
        lambda rate: Load(rate=rate, seed=0, window_s=10.0, grace_s=1.0),
    )


def slots(number: int) -> Settings:
    return Settings(model="demo", max_num_seqs=number)


def candidate(number: int) -> RungCandidate:
    rung = next(rung for rung in load_default_ladder().rungs if rung.id == "batch-limit")
    return RungCandidate(
        rung=rung, label=str(number), changes={"max_num_seqs": number}, settings=slots(number)
    )


def test_incumbent_that_gained_much_is_searched_again_from_its_own_load() -> None:
    """Its search as a candidate ended below its knee: all others would seem to gain the rest."""
    simulator = KneeSimulator({1: 1.0, 2: 200.0, 4: 200.0})
    predictor = knee_predictor(simulator)
    first = predictor.forecast(slots(1), candidate(2), 1.0)
    assert 5 < first.predicted_gain < 150
    later = predictor.forecast(slots(2), candidate(4), 190.0)
    assert later.predicted_gain == 1.0


def test_gains_of_a_twentieth_are_seen() -> None:
    predictor = knee_predictor(KneeSimulator({1: 10.0, 2: 10.8, 4: 10.0}))
    assert predictor.forecast(slots(1), candidate(2), 10.0).predicted_gain > 1.02
    assert predictor.forecast(slots(1), candidate(4), 10.0).predicted_gain == 1.0


def test_error_of_a_kept_rung_is_in_the_incumbent_and_not_in_its_other_variants() -> None:
    predictor = knee_predictor(KneeSimulator({1: 10.0, 2: 20.0, 4: 40.0}))
    forecast = predictor.forecast(slots(1), candidate(2), 10.0)
    assert forecast.predicted is not None
    predictor.learn_trial("batch-limit", forecast.predicted, 1.4, kept=True)
    kept = predictor.forecast(slots(2), candidate(4), 14.0).predicted_gain
    assert kept == pytest.approx(2, rel=0.1)
    predictor.learn_trial("batch-limit", forecast.predicted, 1.0)
    assert predictor.forecast(slots(2), candidate(4), 14.0).predicted_gain < 0.6 * kept


def test_rung_that_loses_is_simulated_again_for_another_incumbent_only() -> None:
    simulator = KneeSimulator({1: 10.0, 2: 5.0, 4: 10.0})
    predictor, start = knee_predictor(simulator), slots(1)
    ranking = Ranking(*cast("list[Any]", [None, None, load_default_ladder(), predictor, None]))
    option = candidate(2)
    limit = WorkLimit(predictor, 100)
    ranked = [
        ranking._best(
            option.rung, [option], cast("Any", SimpleNamespace(settings=s, rate=r)), limit
        )
        for s, r in ((start, 10.0), (start, 9.0), (slots(4), 10.0))
    ]
    assert all(forecast.predicted_gain < 0.7 for forecast in ranked)
    assert ranking._ranked_for == {"batch-limit": slots(4)}


def test_limit_counts_simulated_runs_and_not_seconds() -> None:
    simulator = KneeSimulator({1: 10.0, 2: 20.0, 4: 40.0})
    predictor = knee_predictor(simulator)
    limit = WorkLimit(predictor, 8)
    assert not limit.why_over
    predictor.forecast(slots(1), candidate(2), 10.0)
    assert predictor.work.num_runs == len(simulator.runs) >= 8
    assert predictor.work.num_tokens > 0
    assert limit.why_over == "a ranking ends after 8 simulated runs"
    few = WorkLimit(predictor, 100, 50)
    predictor.forecast(slots(1), candidate(4), 10.0)
    assert few.why_over == "a ranking ends after 50 simulated tokens"
    limit.extend(4.0)
    assert not limit.why_over
    budget = cast("Any", SimpleNamespace(spent_s=30.0))
    limit.end_in(5.0, budget)
    assert not limit.why_over
    budget.spent_s = 36.0
    assert "no time" in limit.why_over


def test_simulated_runs_hold_few_requests_but_outlast_them() -> None:
    """At 1,000 requests/s ten seconds are 10,000 of them, and a ranking would end at once."""
    predictor = knee_predictor(KneeSimulator({1: 1000.0, 2: 2000.0}))
    seen: list[Load] = []
    simulate = predictor._simulator.run

    def run(settings: Settings, load: Load) -> RunTrace:
        seen.append(load)
        return simulate(settings, load)

    predictor._simulator = cast("Any", SimpleNamespace(run=run))
    requests = [SimpleNamespace(scheduled_s=1.0, finished_s=end_s) for end_s in (None, 1.5, 1.5)]
    measured = SimpleNamespace(trace=SimpleNamespace(requests=requests))
    predictor.limit_requests(cast("Any", [measured]))
    forecast = predictor.forecast(slots(1), candidate(2), 1000.0)
    assert forecast.predicted_gain == pytest.approx(2.0, rel=0.1)
    # Ten times the TTFT limit of half a second: more than the 0.4 s of 400 requests, and than four
    # times the half second that a request takes.
    assert {load.window_s for load in seen} == {5.0}
    assert predictor._make_load(50.0).window_s == 8.0
    assert predictor._make_load(20.0).window_s == 10.0


def left_out(rung: str, label: str, reason: str) -> NotTried:
    return NotTried(rung=rung, label=label, reason=reason)


def test_two_rungs_of_one_name_are_left_out_once_with_both_reasons() -> None:
    rows = distinct(
        [
            left_out("no-speculation", "No speculation", "drafts are not set"),
            left_out("fp8", "FP8", "lossy"),
            left_out("vllm-no-speculation", "No speculation", "the server does not speculate"),
            left_out("other", "FP8", "lossy"),
        ]
    )
    assert [(row.label, row.reason) for row in rows] == [
        ("No speculation", "drafts are not set; the server does not speculate"),
        ("FP8", "lossy"),
    ]


@pytest.mark.parametrize("promising", ["vllm-no-speculation", "no-speculation"])
def test_change_that_one_rung_offers_is_not_called_left_out_for_another(promising: str) -> None:
    ranking = Ranking(*cast("list[Any]", [None, None, None, None, None]))
    for rung in ("no-speculation", "vllm-no-speculation"):
        ranking._leave_out(rung, "No speculation", "a reason")
    ranking._promising = {"No speculation": promising}
    assert [row.rung for row in ranking.left_out] == [promising]


def test_what_two_rungs_change_alike_is_ranked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ladder = load_default_ladder()
    rung = next(rung for rung in ladder.rungs if rung.id == "batch-limit")
    twice = msgspec.structs.replace(
        ladder, rungs=(rung, msgspec.structs.replace(rung, id="other", title="Other"))
    )
    job = cast("Any", SimpleNamespace(slo=None, seed=0))
    ranking = Ranking(job, cast("Any", None), twice, cast("Any", None), cast("Any", None))
    monkeypatch.setattr(rung_ranking, "collect_facts", lambda *_: {})
    monkeypatch.setattr(rung_ranking, "unmet_need", lambda *_: None)
    monkeypatch.setattr(ranking, "_unprovable", lambda _: None)
    start = Settings(model="demo", max_num_seqs=8)
    deployment = SimpleNamespace(info=SimpleNamespace(settings={}))
    incumbent = cast("Any", SimpleNamespace(settings=start, deployment=deployment, runs=()))
    possible = ranking._possible(incumbent, frozenset())
    assert [rung.id for rung, _ in possible] == ["batch-limit"]
    assert len(possible[0][1]) > 1
