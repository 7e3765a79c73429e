"""The autoscaler: fast up, slow down, the floor held, and nothing bought in vain."""

from __future__ import annotations

import random

from ridgeline.routing.autoscaler import Autoscaler, FleetSignals, ScalingPolicy

POLICY = ScalingPolicy(
    target_in_flight=10, min_replicas=2, max_replicas=8, allowed_wait_s=1.0, stable_s=60
)


def decide(scaler: Autoscaler, at_s: float, in_flight: int, age_s: float = 0.0) -> int:
    signals = FleetSignals(in_flight=in_flight, num_replicas=4, queue_age_s=age_s)
    return scaler.decide(signals, at_s)


def test_up_at_once_and_down_after_the_stable_window() -> None:
    scaler = Autoscaler(POLICY)
    assert decide(scaler, 0, 5) == 2
    assert decide(scaler, 5, 61) == 7
    assert decide(scaler, 30, 5) == 7
    assert decide(scaler, 64, 30) == 7
    assert decide(scaler, 66, 5) == 3  # what was wanted at 64
    assert decide(scaler, 125, 5) == 2


def test_floor_and_ceiling_hold_also_without_signals() -> None:
    scaler = Autoscaler(POLICY)
    assert scaler.decide(None, 0) == 2
    assert decide(scaler, 1, 1000) == 8
    assert scaler.decide(None, 500) == 8
    assert decide(scaler, 600, 0) == 2
    assert scaler.decide(None, 700) == 2


def test_old_queue_adds_replicas_up_to_double() -> None:
    assert decide(Autoscaler(POLICY), 0, 10, age_s=1.5) == 6
    assert decide(Autoscaler(POLICY), 0, 10, age_s=50) == 8


def test_slo_missed_without_a_queue_buys_nothing() -> None:
    scaler = Autoscaler(POLICY)
    for second in range(600):
        assert decide(scaler, second, 10, age_s=0.9) == 2


def test_batch_work_is_scaled_by_its_deadline() -> None:
    scaler = Autoscaler(POLICY)
    signals = FleetSignals(in_flight=20, num_replicas=2, batch_demand=2.0)
    assert scaler.decide(signals, 0) == 4
    little = FleetSignals(in_flight=15, num_replicas=2, batch_demand=0.4)
    assert Autoscaler(POLICY).decide(little, 0) == 2, "half a replica has room for it"


def test_window_keeps_the_true_maximum() -> None:
    rng = random.Random(3)
    scaler, history = Autoscaler(POLICY), []
    for second in range(500):
        in_flight = rng.randint(0, 90)
        history.append((second, -(-in_flight // 10)))
        most = max(wanted for at_s, wanted in history if at_s >= second - 60)
        assert decide(scaler, second, in_flight) == min(8, max(2, most))
