"""Fill, reuse, occupancy, MFU and MBU of a handful of steps, by hand."""

from __future__ import annotations

import msgspec
import pytest

from ridgeline.measure.metrics.step_metrics import (
    cache_hit_rate,
    latency_bounds,
    occupancy,
    utilisation,
    wasted_steps,
)
from ridgeline.measure.metrics.summary import (
    peak_concurrency,
    queue_age,
    steady_output_tok_s,
    summarise,
)
from ridgeline.roofline import Peaks, Work

PEAKS = Peaks(flops_s=1000.0, bytes_s=100.0)


def work(shapes, num_sampled):
    """10 FLOP per token; 5 bytes of weights and 1 per cached token."""
    tokens = sum(new for new, _ in shapes)
    return Work(10.0 * tokens, 5.0 + sum(cached for _, cached in shapes))


def test_batch_fill_is_three_different_means(step_stat, run_trace):
    steps = [
        step_stat([(100, 0)], run_s=0.03),  # 1 of 8 slots, 100 tokens
        step_stat([(1, 9)] * 4, run_s=0.01),  # 4 of 8 slots, 4 tokens
    ]
    found = occupancy(run_trace([], steps=steps, duration_s=0.1))
    assert found is not None
    assert found.batch_fill == pytest.approx((0.03 / 8 + 0.01 * 4 / 8) / 0.04)
    assert found.batch_fill_tokens == pytest.approx((100 / 8 + 4 * 4 / 8) / 104)
    assert found.batch_fill_steps == pytest.approx((1 / 8 + 4 / 8) / 2)
    assert found.mean_runs == 2.5
    assert found.busy_share == pytest.approx(0.4)
    assert found.plan_share == pytest.approx(0.02)


def test_kv_occupancy_hits_and_preemptions(step_stat, run_trace):
    steps = [
        step_stat([(8, 8)], used_blocks=8, queried_tokens=16, hit_tokens=8, num_preempted=1),
        step_stat([(1, 16)], used_blocks=4, run_s=0.03),
    ]
    found = occupancy(run_trace([], steps=steps, duration_s=1.0))
    assert found is not None
    assert found.kv_occupancy == pytest.approx((0.01 * 0.5 + 0.03 * 0.25) / 0.04)
    assert found.kv_occupancy_max == 0.5
    assert found.cache_hit_rate == 0.5
    assert found.num_preemptions == 1
    assert cache_hit_rate([steps[1]]) is None  # nothing looked up is not a rate of zero


def test_a_server_without_step_records_has_no_occupancy(run_trace):
    assert occupancy(run_trace([])) is None


def test_utilisation_by_phase_over_busy_and_wall_time(step_stat, run_trace):
    steps = [step_stat([(10, 0)], run_s=0.2), step_stat([(1, 10)], run_s=0.3)]
    found = utilisation(run_trace([], steps=steps, duration_s=1.0), work, PEAKS)
    prefill, decode, overall = found["prefill"], found["decode"], found["overall"]
    assert "mixed" not in found
    assert (prefill.flops, prefill.nbytes) == (100.0, 5.0)
    assert prefill.mfu_busy == pytest.approx(100 / (0.2 * 1000))
    assert decode.mbu_busy == pytest.approx(15 / (0.3 * 100))
    assert decode.bound_s == pytest.approx(0.15)
    assert overall.mfu_wall == pytest.approx(110 / 1000)
    assert overall.mbu_wall == pytest.approx(20 / 100)
    assert overall.busy_s == pytest.approx(0.5)


def test_figures_are_reported_with_their_bounds(step_stat, request_trace, run_trace):
    requests = [request_trace(prompt_tokens=30, cached_tokens=20, token_s=(0.2, 0.3, 0.4))]
    steps = [step_stat([(10, 20)]), step_stat([(1, 30)]), step_stat([(1, 31)])]
    found = latency_bounds(run_trace(requests, steps=steps), work, PEAKS)
    ttft = max(100 / 1000, 25 / 100)
    decode = (35 / 100 + 36 / 100) / 2
    assert found.ttft_s == pytest.approx(ttft)
    assert found.tpot_s == pytest.approx(decode)
    assert found.e2e_s == pytest.approx(ttft + 2 * decode)
    assert found.output_tok_s == pytest.approx(3 / (0.25 + 0.35 + 0.36))
    assert latency_bounds(run_trace(requests), work, PEAKS).tpot_s is None


def test_summary_counts_and_rates(request_trace, run_trace):
    requests = [
        request_trace(scheduled_s=0.0, token_s=(0.5, 1.0), cached_tokens=4),
        request_trace(scheduled_s=1.0, sent_s=1.5, token_s=(2.0, 2.5), token_counts=(1, 3)),
        request_trace(scheduled_s=2.0, token_s=(), finished_s=2.1, error="HTTP 500"),
        request_trace(scheduled_s=4.0, token_s=(), error="timeout: late", finished_s=5.0),
    ]
    found = summarise(run_trace(requests, duration_s=10.0))
    assert (found.num_ok, found.num_failed, found.num_timeout, found.num_cancelled) == (2, 1, 1, 0)
    assert (found.input_tokens, found.output_tokens, found.cached_tokens) == (20, 6, 4)
    assert found.output_tok_s == pytest.approx(0.6)
    assert found.request_rate == pytest.approx(0.2)
    assert found.offered_rate == pytest.approx(3 / 4)
    assert found.tokens_per_chunk == pytest.approx(6 / 4)
    assert found.client_queue is not None
    assert found.client_queue.max == 0.5
    assert found.queue is None  # the server did not tell
    assert found.goodput is None


def test_steady_rate_counts_the_inner_part_of_requests_that_span_an_edge(request_trace, run_trace):
    requests = [
        request_trace(scheduled_s=0.0, token_s=(0.5, 1.0)),
        request_trace(scheduled_s=0.0, token_s=(0.5, 1.5, 2.0, 3.5)),  # spans both edges
        request_trace(scheduled_s=3.0, token_s=(3.5, 4.0)),
    ]
    # the window runs from the first completion (1.0) to the last send (3.0)
    assert steady_output_tok_s(run_trace(requests)) == pytest.approx(2 / 2.0)
    assert steady_output_tok_s(run_trace(requests[:1])) is None


def test_peak_concurrency_ends_before_it_begins(request_trace):
    requests = (
        request_trace(scheduled_s=0.0, token_s=(0.5,), finished_s=1.0),
        request_trace(scheduled_s=0.5, token_s=(0.7,), finished_s=2.0),
        request_trace(scheduled_s=1.0, token_s=(1.2,), finished_s=2.0),
    )
    assert peak_concurrency(requests) == 2


def test_slots_are_wasted_only_while_requests_wait(step_stat, run_trace):
    steps = [
        step_stat([(1, 9)] * 2, num_running=2, num_waiting=3, run_s=0.1),
        step_stat([(1, 9)] * 2, num_running=2, num_waiting=0, run_s=0.3),
        step_stat([(1, 9)] * 8, num_running=8, num_waiting=5, run_s=0.1),
    ]
    found = occupancy(run_trace([], steps=steps, duration_s=1.0))
    assert found is not None
    assert found.wasted_slots == pytest.approx(6 * 0.1 / (8 * 0.5))


def test_steps_are_wasted_by_recomputation_and_failures(step_stat, request_trace, run_trace):
    answer = request_trace(prompt_tokens=30, cached_tokens=20, token_s=(0.2, 0.3, 0.4))
    needed = [step_stat([(10, 20)]), step_stat([(1, 30)]), step_stat([(1, 31)])]
    assert wasted_steps(run_trace([answer], steps=needed)) == 0.0
    again = [*needed, step_stat([(12, 20)])]
    assert wasted_steps(run_trace([answer], steps=again)) == pytest.approx(0.5)
    failed = msgspec.structs.replace(answer, error="timeout")
    assert wasted_steps(run_trace([failed], steps=needed)) == 1.0


def test_queue_age_is_that_of_the_oldest_waiting_request(request_trace):
    def waiting(sent_s, started_s):
        made = request_trace(token_s=(100.0,))
        return msgspec.structs.replace(made, sent_s=sent_s, started_s=started_s)

    found = queue_age([waiting(0.0, 10.0), waiting(1.0, 5.0), waiting(2.0, 12.0)])
    assert found is not None
    assert found.max_s == 10.0 and found.waiting_share == 1.0
    # ages 0 to 10 in ten seconds, then 8 to 10 in two
    assert found.mean_s == pytest.approx((50 + 18) / 12)
    assert queue_age([waiting(0.0, None)]) is None
