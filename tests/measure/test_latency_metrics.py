"""Latency definitions against hand-computed values, an edge case of measurements.md each."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.measure.metrics import latency


def test_latencies_from_schedule_and_from_send_differ_by_the_wait(request_trace):
    r = request_trace(scheduled_s=1.0, sent_s=1.5, started_s=1.7, token_s=(2.0, 2.25, 2.75))
    assert latency.ttft_s(r) == 1.0
    assert latency.ttft_s(r, "sent") == 0.5
    assert latency.e2e_s(r) == 1.75
    assert latency.e2e_s(r, "sent") == 1.25
    assert latency.client_queue_s(r) == 0.5
    assert latency.queue_s(r) == pytest.approx(0.2)


def test_tpot_leaves_the_first_token_out(request_trace):
    r = request_trace(token_s=(2.0, 2.25, 2.75))
    assert latency.tpot_s(r) == pytest.approx(0.375)  # (2.75 - 2.0) / 2


def test_tpot_of_a_first_chunk_with_several_tokens_counts_only_what_followed(request_trace):
    r = request_trace(token_s=(1.0, 2.0), token_counts=(3, 4))
    assert latency.tpot_s(r) == pytest.approx(0.25)  # 1 s / 4 tokens, not 1 s / 6


@pytest.mark.parametrize("counts", [(1,), (5,)])
def test_one_token_or_one_chunk_has_no_tpot_and_no_itl(request_trace, counts):
    r = request_trace(token_s=(0.2,), token_counts=counts)
    assert latency.tpot_s(r) is None
    assert latency.itl_s(r) == []
    assert latency.itl_chunk_s(r) == []


def test_itl_per_chunk_and_per_token(request_trace):
    r = request_trace(token_s=(1.0, 1.3, 1.4), token_counts=(1, 3, 1))
    assert latency.itl_chunk_s(r) == pytest.approx([0.3, 0.1])
    assert latency.itl_s(r) == pytest.approx([0.1, 0.1, 0.1, 0.1])


def test_tpot_is_the_mean_of_the_tokens_itl(request_trace):
    r = request_trace(token_s=(1.0, 1.3, 1.9), token_counts=(2, 3, 1))
    assert latency.tpot_s(r) == pytest.approx(np.mean(latency.itl_s(r)))


def test_e2e_ends_at_the_last_token_not_at_the_usage_chunk(request_trace):
    r = request_trace(token_s=(0.2, 0.3), finished_s=5.0)
    assert latency.e2e_s(r) == pytest.approx(0.3)


def test_a_request_without_output_ends_when_it_finished(request_trace):
    r = request_trace(token_s=(), finished_s=0.7)
    assert latency.ttft_s(r) is None
    assert latency.e2e_s(r) == 0.7


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "ok"),
        ({"error": "HTTP 503"}, "failed"),
        ({"error": "timeout: no end after 3 s"}, "timeout"),
        ({"error": "cancelled: stop", "finish_reason": "abort"}, "cancelled"),
        ({"finish_reason": "abort"}, "cancelled"),
        ({"finished_s": None}, "failed"),
    ],
)
def test_outcomes(request_trace, fields, expected):
    assert latency.outcome(request_trace(**fields)) == expected


def test_tpot_including_the_first_is_kept_apart(request_trace):
    r = request_trace(token_s=(2.0, 2.25, 2.75))
    assert latency.tpot_incl_first_s(r) == pytest.approx(2.75 / 3)


def test_fluidity_gives_slack_for_early_tokens_and_resets_it_after_a_miss(request_trace):
    # deadlines: first within 1 s, then 0.1 s each. First at 0.5 (slack 0.5); second 0.55 later uses
    # 0.45 of the slack and is met; third 0.3 later is missed (0.15 allowed); fourth 0.1 later is
    # met.
    r = request_trace(token_s=(0.5, 1.05, 1.35, 1.45 - 1e-9))
    assert latency.fluidity(r, 1.0, 0.1) == pytest.approx(3 / 4)
    assert latency.fluidity(request_trace(token_s=()), 1.0, 0.1) is None


def test_split_by_kind_and_by_input_length(request_trace, run_trace):
    run = run_trace(
        [request_trace(kind=k, prompt_tokens=n) for k, n in (("a", 64), ("b", 65), ("a", 10**6))]
    )
    assert {k: len(v.requests) for k, v in latency.split(run, latency.by_kind).items()} == {
        "a": 2,
        "b": 1,
    }
    assert list(latency.split(run, latency.by_input_length)) == [
        "input<=000064",
        "input<=000128",
        "input>131072",
    ]


finite = st.floats(0, 1e6)


@given(st.lists(finite, min_size=1), st.integers(0, 20), st.floats(0, 100))
def test_failing_never_improves_a_percentile(values, num_failed, q):
    before = latency.distribution(values)
    assert before is not None
    after = before.with_failures(num_failed)
    assert after.p(q) >= before.p(q)
    assert not math.isnan(after.p(q))


def test_distribution_of_nothing_is_nothing_not_zero():
    assert latency.distribution([None, None]) is None


def test_distribution_figures():
    d = latency.distribution([4.0, None, 1.0, 2.0, 3.0])
    assert d is not None
    assert (d.count, d.mean, d.max, d.p(50)) == (4, 2.5, 4.0, 2.5)
    assert d.std == pytest.approx(np.std([1, 2, 3, 4]))


def test_pooling_is_token_weighted(request_trace):
    long = request_trace(token_s=tuple(0.1 * i for i in range(1, 11)))  # nine gaps of 0.1
    short = request_trace(token_s=(1.0, 2.0))  # one gap of 1.0
    pool = latency.pool_values([long, short], latency.itl_s)
    assert pool is not None
    assert pool.mean == pytest.approx((9 * 0.1 + 1.0) / 10)


def test_first_visible_token_is_the_first_one_that_is_not_reasoning(request_trace):
    plain = request_trace(token_s=(0.2, 0.3))
    assert latency.visible_s(plain) == latency.ttft_s(plain)
    reasoned = request_trace(scheduled_s=1.0, token_s=(1.2, 3.5), reasoned=True, visible_s=3.5)
    assert latency.visible_s(reasoned) == pytest.approx(2.5)
    assert latency.visible_s(request_trace(reasoned=True)) is None


def test_tokens_per_second_of_one_user_are_the_inverse_of_tpot(request_trace):
    assert latency.user_tok_s(request_trace(token_s=(0.0, 0.5, 1.0))) == pytest.approx(2.0)
    assert latency.user_tok_s(request_trace(token_s=(0.1,))) is None
