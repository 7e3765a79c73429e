"""The wait of dynamic batching, derived from the TTFT of the first request."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ridgeline.engine.scheduler.admission.first_token_times import (
    MAX_OPEN,
    MIN_MEASURED,
    SPENT,
    WINDOW,
    FirstTokenTimes,
)
from ridgeline.engine.scheduler.batching import QueueView, make_policy, seconds_of
from ridgeline.engine.scheduler.batching.base import DEFAULT_WAIT_S
from ridgeline.records import Request, Sampling, Slo, Started, Token


def measured(seconds: list[float]) -> FirstTokenTimes:
    times = FirstTokenTimes()
    for i, value in enumerate(seconds):
        started = Started(request_id=f"r{i}", at_s=float(i), cached_tokens=0)
        first, second = (
            Token(request_id=f"r{i}", index=0, token=1, text="", at_s=i + value + gap)
            for gap in (0.0, 5.0)
        )
        times.observe([started])
        times.observe([first])
        times.observe([second])
    return times


def request(ttft_s: float | None) -> Request:
    slo = None if ttft_s is None else Slo(ttft_s=ttft_s)
    return Request(id="r", prompt=(1,), sampling=Sampling(), arrival_s=100.0, slo=slo)


def test_latest_start_leaves_the_p95_of_the_last_requests() -> None:
    draw = random.Random(1)
    for _ in range(20):
        seconds = [draw.random() for _ in range(draw.randint(MIN_MEASURED, 2 * WINDOW))]
        p95 = np.percentile(seconds[-WINDOW:], 95, method="inverted_cdf")
        expected = 100.0 + max(0.0, SPENT * 0.9 - p95)
        assert measured(seconds).latest_start_s(request(0.9)) == pytest.approx(expected)


def test_nothing_is_derived_without_a_ttft_or_measurements() -> None:
    assert measured([0.1] * MIN_MEASURED).latest_start_s(request(None)) is None
    assert measured([0.1] * (MIN_MEASURED - 1)).latest_start_s(request(0.9)) is None


def test_requests_that_never_get_a_token_are_forgotten() -> None:
    times = FirstTokenTimes()
    times.observe(
        Started(request_id=f"r{i}", at_s=0.0, cached_tokens=0) for i in range(MAX_OPEN + 10)
    )
    assert len(times._started_s) == MAX_OPEN


def view(now_s: float, latest_start_s: float | None) -> QueueView:
    return QueueView(now_s, 0, 0, 8, 2, 100.0, 1, latest_start_s)


def test_batch_starts_at_the_latest_start_of_its_first_request() -> None:
    policy = make_policy("dynamic", wait_s=None)
    assert policy.wake_s(view(100.0, 100.4)) == 100.4
    assert not policy.admits(view(100.39, 100.4))
    assert policy.admits(view(100.4, 100.4))
    assert policy.wake_s(view(100.0, None)) == 100.0 + DEFAULT_WAIT_S


def test_wait_that_was_given_overrides_the_slo() -> None:
    policy = make_policy("dynamic", wait_s=seconds_of(50.0))
    assert policy.wake_s(view(100.0, 100.4)) == 100.05
    assert seconds_of(None) is None
