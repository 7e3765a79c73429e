"""Runs that are cut: who keeps the pace is completed on paper, who does not has missed."""

from __future__ import annotations

import msgspec
import pytest

from ridgeline.config.settings import Settings
from ridgeline.measure.metrics.goodput import meets
from ridgeline.optimize.comparison.early_stop import complete_unfinished, time_to_decide_s
from ridgeline.optimize.comparison.objective import judge_run
from ridgeline.optimize.environment import Load
from ridgeline.records import RequestTrace, RunTrace, Slo
from tests.optimize.simulated_servers import Physics, simulate

SLO = Slo.parse("ttft:500 tpot:50")


def cut(
    num_tokens: int, tpot_s: float = 0.04, error: str | None = "cancelled: unfinished 1 s after"
) -> RunTrace:
    run = simulate(Physics(), Settings(), Load(rate=1.0, seed=0, window_s=1.0, grace_s=5.0), 1.0)
    request = RequestTrace(
        id="a", kind="", scheduled_s=0.0, sent_s=0.0, started_s=0.1,
        token_s=tuple(0.2 + i * tpot_s for i in range(num_tokens)),
        token_counts=(1,) * num_tokens, finished_s=1.0, prompt_tokens=10, cached_tokens=0,
        output_tokens=num_tokens, requested_tokens=101, finish_reason="abort", error=error,
    )  # fmt: skip
    return msgspec.structs.replace(run, requests=(request,))


def test_request_within_its_slo_is_extrapolated() -> None:
    found = complete_unfinished(cut(11)).requests[0]
    assert meets(found, SLO) and found.output_tokens == 101
    assert found.finished_s == pytest.approx(0.2 + 100 * 0.04)


@pytest.mark.parametrize(
    "run",
    [
        cut(11, tpot_s=0.06),
        cut(0),
        cut(4),
        cut(11, error="cancelled: more was lost"),
        cut(11, error="crashed"),
    ],
)
def test_late_or_unknown_request_counts_as_missed(run: RunTrace) -> None:
    assert not meets(complete_unfinished(run).requests[0], SLO)


def test_e2e_slo_waits_for_whole_answers() -> None:
    assert time_to_decide_s(SLO) == pytest.approx(0.5 + 12 * 0.05)
    assert time_to_decide_s(Slo.parse("ttft:500 tpot:50 e2e:5000")) is None
    assert time_to_decide_s(Slo.parse("tpot:50")) is None


def test_a_cut_run_is_scored_as_the_whole_one() -> None:
    """The same load on the same server, waited for and cut."""
    settings = Settings(batching="continuous", max_num_seqs=16)
    physics = Physics(output=100)
    for rate in (4.0, 8.0, 60.0):
        whole = Load(rate=rate, seed=3, window_s=3.0, grace_s=30.0)
        short = msgspec.structs.replace(whole, grace_s=1.1)
        scores = [
            judge_run(simulate(physics, settings, load, 1.0), load, SLO, "goodput")
            for load in (whole, short)
        ]
        assert scores[1].holds == scores[0].holds
        assert scores[1].score == pytest.approx(scores[0].score, rel=0.1)
