"""Who meets the SLO, and what counts in the denominator."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.measure.metrics.goodput import goodput, meets, output_ratio, validity_of, verdicts
from ridgeline.records import Slo

SLO = Slo.parse("ttft:250 tpot:150 e2e:1000")


def test_verdicts_name_every_limit_that_was_exceeded(request_trace):
    assert verdicts(request_trace(token_s=(0.2, 0.3)), SLO) == ("met",)
    assert verdicts(request_trace(token_s=(0.3, 0.4)), SLO) == ("ttft",)
    assert verdicts(request_trace(token_s=(0.2, 0.4)), SLO) == ("tpot",)
    assert verdicts(request_trace(token_s=(0.3, 1.1)), SLO) == ("ttft", "tpot", "e2e")


def test_a_limit_met_exactly_is_met(request_trace):
    assert meets(request_trace(token_s=(0.25, 0.375)), SLO)


def test_latency_counts_from_the_schedule(request_trace):
    assert not meets(request_trace(scheduled_s=0.0, sent_s=0.5, token_s=(0.6, 0.7)), SLO)


def test_one_token_answers_are_not_counted_as_meeting_tpot(request_trace):
    one = request_trace(token_s=(0.2,))
    assert verdicts(one, Slo.parse("tpot:50")) == ("unobserved",)
    assert meets(one, Slo.parse("ttft:250 tpot:50"))  # judged by what can be seen of it


def test_failures_of_every_kind_stay_in_the_denominator(request_trace, run_trace):
    run = run_trace(
        [
            request_trace(),
            request_trace(),
            request_trace(error="HTTP 500"),
            request_trace(error="timeout: late"),
            request_trace(finish_reason="abort"),
        ],
        duration_s=10.0,
    )
    found = goodput(run, SLO)
    assert (found.num_requests, found.num_met, found.num_failed) == (5, 2, 3)
    assert found.attainment == pytest.approx(0.4)
    assert found.goodput_req_s == pytest.approx(0.2)
    assert found.misses == {"failed": 3}
    assert not found.holds


def test_error_rate_is_a_separate_limit(request_trace, run_trace):
    run = run_trace([*[request_trace()] * 99, request_trace(error="HTTP 500")])
    assert not goodput(run, Slo.parse("ttft:250")).holds
    assert goodput(run, Slo.parse("ttft:250 error:1%")).holds


def test_no_requests_have_zero_attainment(run_trace):
    found = goodput(run_trace([]), SLO)
    assert (found.attainment, found.goodput_req_s, found.holds) == (0.0, 0.0, False)


@given(st.lists(st.tuples(st.floats(0.01, 1), st.booleans()), min_size=1, max_size=30))
def test_goodput_is_bounded_and_failing_never_raises_it(request_trace, run_trace, cases):
    requests = [
        request_trace(token_s=(t, t + 0.05), error="broken" if bad else None) for t, bad in cases
    ]
    run = run_trace(requests, duration_s=5.0)
    found = goodput(run, SLO)
    assert 0 <= found.attainment_low <= found.attainment <= found.attainment_high <= 1
    assert found.goodput_req_s <= len(requests) / 5.0
    worse = run_trace([request_trace(error="broken"), *requests[1:]], duration_s=5.0)
    assert goodput(worse, SLO).num_met <= found.num_met


def test_validity_sees_a_busy_client_late_sends_and_short_answers(request_trace, run_trace):
    fine = [request_trace(scheduled_s=float(i), token_s=(i + 0.2, i + 0.3)) for i in range(5)]
    assert validity_of(run_trace(fine, client_cpu_share=0.2, send_lag_p99_s=0.001)).valid
    assert "bottleneck" in validity_of(run_trace(fine, client_cpu_share=0.95)).reasons[0]
    assert "late" in validity_of(run_trace(fine, send_lag_p99_s=0.6)).reasons[0]
    assert "late" in validity_of(run_trace(fine, send_lag_p99_s=0.1)).reasons[0]  # 10% of TTFT
    short = [request_trace(requested_tokens=100)]
    assert output_ratio(run_trace(short)) == pytest.approx(0.02)
    assert "stops early" in validity_of(run_trace(short)).reasons[0]
    assert "out of order" in validity_of(run_trace([request_trace(sent_s=9.0)])).reasons[0]
