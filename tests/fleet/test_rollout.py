"""Rollouts: planted faults are caught, equal versions are promoted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.bench_canary import SESSIONS, needed
from ridgeline.errors import BadInput
from ridgeline.fleet.canary.evidence import (
    ODDS_RATIOS,
    RANK_BETS,
    EventEvidence,
    RankEvidence,
    RateEvidence,
    event_bet,
)
from ridgeline.fleet.canary.rollout import Outcome, Rollout, RolloutConfig, RolloutRecord

NUM_RUNS = 1000
CONFIG = RolloutConfig()
NOISE = 0.3  # standard deviation of the logarithm of a session's time per token


def event_evidence(rng: np.random.Generator, rate: float) -> np.ndarray:
    """Log evidence after each bad event of equal versions: (runs, events)."""
    logs = []
    for share in CONFIG.stages:
        num_events = round(CONFIG.min_sessions / share * rate)
        is_canary = rng.random((NUM_RUNS, num_events)) < share
        bets = [
            np.where(is_canary, *(math.log(event_bet(side, share, r)) for side in (True, False)))
            for r in ODDS_RATIOS
        ]
        logs.append(np.stack(bets))
    return mean_of_products(np.concatenate(logs, axis=2))


def rank_evidence(rng: np.random.Generator) -> np.ndarray:
    """Log evidence after each session of the canary, of equal versions: (runs, sessions)."""
    logs = []
    for share in CONFIG.stages:
        num_others = round(1 / share) - 1
        size = (NUM_RUNS, CONFIG.min_sessions)
        own = rng.lognormal(0, NOISE, size) / (1 + CONFIG.max_slowdown)
        ranks = sum((rng.lognormal(0, NOISE, size) < own).astype(int) for _ in range(num_others))
        place = 2 * ranks / num_others - 1
        logs.append(np.stack([np.log1p(bet * place) for bet in RANK_BETS]))
    return mean_of_products(np.concatenate(logs, axis=2))


def mean_of_products(logs: np.ndarray) -> np.ndarray:
    return np.logaddexp.reduce(np.cumsum(logs, axis=2), axis=0) - math.log(len(logs))


def test_equal_versions_are_rolled_back_in_at_most_five_percent_of_rollouts() -> None:
    rng = np.random.default_rng(0)
    threshold = CONFIG.log_needed
    assert threshold == pytest.approx(math.log(5 / CONFIG.alpha))
    tests = [
        event_evidence(rng, 0.02),
        event_evidence(rng, 0.2),
        rank_evidence(rng),
        rank_evidence(rng),
    ]
    rolled_back = np.zeros(NUM_RUNS, bool)
    for logs in tests:
        rolled_back |= (logs >= threshold).any(axis=1)
    assert 0 < rolled_back.mean() <= CONFIG.alpha


def test_simulated_evidence_is_that_of_the_classes() -> None:
    rng = np.random.default_rng(1)
    is_canary, ranks = rng.random(50) < 0.25, rng.integers(0, 4, 50)
    events, places = EventEvidence(), RankEvidence()
    for one, rank in zip(is_canary, ranks, strict=True):
        events.note(bool(one), 0.25)
        places.note(float(rank), 3)
    by_event = [
        np.where(is_canary, *(math.log(event_bet(side, 0.25, r)) for side in (True, False)))
        for r in ODDS_RATIOS
    ]
    by_rank = [np.log1p(bet * (2 * ranks / 3 - 1)) for bet in RANK_BETS]
    for test, logs in ((events, by_event), (places, by_rank)):
        expected = mean_of_products(np.stack(logs)[:, None])[0, -1]
        assert test.log_evidence == pytest.approx(expected)


@pytest.mark.parametrize("share", [0.05, 0.25, 0.5])
@pytest.mark.parametrize("ratio", ODDS_RATIOS)
def test_bets_on_equal_versions_expect_one(share: float, ratio: float) -> None:
    expected = share * event_bet(True, share, ratio) + (1 - share) * event_bet(False, share, ratio)
    assert expected == pytest.approx(1)


def test_small_fault_is_found_with_enough_sessions() -> None:
    """7 % of the canary's sessions have errors where 5 % of the others do: too little for a bet on
    twice the odds, however many there are."""
    rng, share, num_caught = np.random.default_rng(4), 0.25, 0
    part = share * 0.07 / (share * 0.07 + (1 - share) * 0.05)  # of the errors
    for _ in range(20):
        test, num_errors = EventEvidence(), 0
        while test.log_evidence < CONFIG.log_needed and num_errors < 1500:
            test.note(bool(rng.random() < part), share)
            num_errors += 1
        num_caught += test.log_evidence >= CONFIG.log_needed
    assert num_caught == 20


def test_differing_tokens_within_the_bound_are_no_evidence() -> None:
    rng = np.random.default_rng(2)
    for rate, expected in ((0.001, False), (0.01, True)):
        test = RateEvidence(0.002)
        for hits in rng.binomial(100, rate, 300):
            test.note(100, int(hits))
        assert (test.log_evidence > math.log(100)) == expected


def run(
    rng: np.random.Generator, *, slowdown: float = 1.0, error_rate: float = 0.0
) -> tuple[Rollout, int]:
    """A rollout from the end of the shadow, and how many sessions the canary got."""
    rollout, number, num_canary = Rollout(CONFIG, RolloutRecord(state="split")), 0, 0
    while rollout.state == "split":
        number += 1
        session = f"{rng.random()}"
        arm = rollout.arm_of(session)
        is_canary = arm == "canary"
        num_canary += is_canary
        pace_s = 0.05 * rng.lognormal(0, NOISE) * (slowdown if is_canary else 1)
        has_failed = is_canary and rng.random() < error_rate
        outcome = Outcome(has_failed=has_failed, ttft_s=rng.lognormal(0, NOISE), pace_s=pace_s)
        rollout.note_outcome(arm, session, outcome)
    return rollout, num_canary


@pytest.mark.parametrize("seed", range(5))
def test_ten_percent_slower_version_is_rolled_back(seed: int) -> None:
    rollout, _ = run(np.random.default_rng(seed), slowdown=1.1)
    assert rollout.state == "rolled-back"
    assert rollout.record.reasons == ["its time per token is longer"]


@pytest.mark.parametrize("seed", range(5))
def test_version_with_one_percent_errors_is_rolled_back(seed: int) -> None:
    rollout, num_canary = run(np.random.default_rng(seed), error_rate=0.01)
    assert rollout.record.reasons == ["more of its sessions have errors"]
    assert num_canary < 900


def test_equal_version_is_promoted() -> None:
    rollout, num_canary = run(np.random.default_rng(0))
    assert rollout.state == "promoted" and num_canary >= 900


@pytest.mark.parametrize("seed", range(10))
def test_one_flipped_token_in_ten_thousand_ends_the_shadow(seed: int) -> None:
    rng, rollout = np.random.default_rng(seed), Rollout(CONFIG)
    while rollout.state == "shadow":
        num_tokens = int(rng.integers(16, 256))
        rollout.note_comparison(num_tokens, int((rng.random(num_tokens) < 1e-4).any()))
    assert rollout.state == "rolled-back"
    assert rollout.record.reasons == ["its answers differ from the stable version's"]


def test_sessions_of_the_canary_stay_with_it_as_its_share_grows() -> None:
    rollout = Rollout(CONFIG, RolloutRecord(state="split"))
    sessions = [str(i) for i in range(2000)]
    before: set[str] = set()
    for stage, share in enumerate(CONFIG.stages):
        rollout.record.stage = stage
        own = {session for session in sessions if rollout.arm_of(session) == "canary"}
        assert before <= own and abs(len(own) / len(sessions) - share) < 0.03
        before = own
    rollout.record.state = "rolled-back"
    assert {rollout.arm_of(session) for session in sessions} == {"stable"}


def test_many_errors_of_one_session_count_once() -> None:
    rollout = Rollout(CONFIG, RolloutRecord(state="split"))
    for _ in range(100):
        rollout.note_outcome("canary", "one", Outcome(has_failed=True))
    assert rollout.state == "split"


def test_answers_that_are_not_streamed_complete_a_stage() -> None:
    rollout = Rollout(CONFIG, RolloutRecord(state="split"))
    for number in range(CONFIG.min_sessions):
        rollout.note_outcome("canary", str(number), Outcome(has_failed=False, pace_s=0.05))
    assert rollout.record.stage == 1


@pytest.mark.parametrize("stages", [(), (0.0,), (0.5, 1.0)])
def test_impossible_stages_are_refused(stages: tuple[float, ...]) -> None:
    with pytest.raises(BadInput):
        RolloutConfig(stages=stages)


def test_number_of_sessions_is_missing_where_none_suffices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = needed(0.0, 0.2, 10, 0)
    assert found["min_sessions"] in SESSIONS and found["caught"] in (9, 10)
    monkeypatch.setattr("benchmarks.bench_canary.SESSIONS", (10, 20))
    found = needed(0.2, 0.21, 10, 0)
    assert found["min_sessions"] is found["all"] is None and found["caught"] < 9
