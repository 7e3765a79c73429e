"""The load client in virtual time: what is recorded, under which limits, and what survives a
failure.
"""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from ridgeline.errors import BadInput, EngineUnavailable
from ridgeline.measure.client.load_client import LoadOptions, run_load
from ridgeline.measure.metrics.latency import outcome
from ridgeline.measure.metrics.summary import peak_concurrency, summarise
from ridgeline.measure.workload import parse_workload
from ridgeline.measure.workload.arrivals import Closed, burst, constant, poisson

approx = partial(pytest.approx, abs=1e-6)  # the virtual clock moves a little with every step

SHORT = parse_workload("synthetic:input=8,output=3")


def load(in_virtual_time, target, arrivals, workload=SHORT, **options):
    async def main():
        made = target() if callable(target) else target
        return await run_load(made, workload, arrivals, LoadOptions(**options))

    return in_virtual_time(main())


def test_recorded_times_match_the_script(in_virtual_time, scripted):
    run = load(in_virtual_time, scripted, constant(2.0), num_requests=3)
    assert [r.scheduled_s for r in run.requests] == [0.0, 0.5, 1.0]
    last = run.requests[-1]
    assert last.token_s == approx((1.1, 1.11, 1.12))
    assert last.started_s == approx(1.0)
    assert (last.output_tokens, last.requested_tokens, last.prompt_tokens) == (3, 3, 10)
    assert last.text == "abb"
    assert run.duration_s == approx(1.12)
    assert (run.arrivals, run.workload) == ("constant:2.0", SHORT.name)
    assert run.send_lag_p99_s == approx(0.0)


def test_closed_loop_keeps_exactly_its_concurrency(in_virtual_time, scripted):
    run = load(in_virtual_time, scripted, Closed(4), num_requests=22)
    assert peak_concurrency(run.requests) == 4
    assert run.duration_s == approx(6 * 0.12)  # 22 requests, 4 at a time: 6 waves
    assert all(r.sent_s == approx(r.scheduled_s) for r in run.requests)


def test_waiting_for_the_concurrency_cap_counts_as_latency(in_virtual_time, scripted):
    run = load(in_virtual_time, scripted, burst(), num_requests=4, max_concurrency=1)
    assert [r.sent_s for r in run.requests] == approx([0.0, 0.12, 0.24, 0.36])
    assert all(r.scheduled_s == 0.0 for r in run.requests)
    found = summarise(run)
    assert found.ttft is not None
    assert found.ttft_from_send is not None
    assert found.ttft.max == approx(0.46)
    assert found.ttft_from_send.max == approx(0.1)
    assert run.send_lag_p99_s == approx(0.0)  # the cap's wait is not the client's lag
    assert run.arrivals == "burst cap:1"


def test_an_open_loop_does_not_wait_for_the_server(in_virtual_time, scripted):
    run = load(in_virtual_time, lambda: scripted(slots=1), constant(100.0), num_requests=20)
    assert [r.sent_s for r in run.requests] == approx([i / 100 for i in range(20)])


def test_duration_ends_arrivals_and_lets_the_rest_finish(in_virtual_time, scripted):
    run = load(in_virtual_time, scripted, constant(2.0), num_requests=None, duration_s=1.0)
    assert [r.scheduled_s for r in run.requests] == [0.0, 0.5]
    closed = load(in_virtual_time, scripted, Closed(1), num_requests=None, duration_s=0.3)
    assert len(closed.requests) == 3
    assert all(outcome(r) == "ok" for r in (*run.requests, *closed.requests))


def test_failures_keep_their_messages(in_virtual_time, scripted):
    def fail(request):
        return "HTTP 500: out of order" if request.id.endswith("-1") else None

    run = load(in_virtual_time, lambda: scripted(fail=fail), constant(1.0), num_requests=3)
    assert [r.error for r in run.requests] == [None, "HTTP 500: out of order", None]
    assert run.requests[1].output_tokens == 3  # what it had sent before


def test_a_timeout_keeps_the_tokens_that_came(in_virtual_time, scripted):
    run = load(in_virtual_time, scripted, burst(), num_requests=1, timeout_s=0.115)
    (r,) = run.requests
    assert outcome(r) == "timeout"
    assert r.error == "timeout: no end after 0.115 s"
    assert r.token_s == approx((0.1, 0.11))
    assert r.finished_s == approx(0.115)


def test_an_exception_in_a_target_is_one_failed_request(in_virtual_time, scripted):
    class Breaking(scripted):
        async def send(self, request, record):
            if request.id.endswith("-0"):
                raise ConnectionResetError("gone")
            await super().send(request, record)

    run = load(in_virtual_time, Breaking, burst(), num_requests=2)
    assert sorted(r.error or "" for r in run.requests) == ["", "ConnectionResetError: gone"]


def test_target_without_events_is_a_failed_request(in_virtual_time, scripted):
    class Mute(scripted):
        async def send(self, request, record):
            return None

    run = load(in_virtual_time, Mute, burst(), num_requests=1)
    assert outcome(run.requests[0]) == "failed"


def test_stopping_early_cancels_what_is_in_flight_and_keeps_it(in_virtual_time, scripted):
    async def main():
        seen = []

        def watch(trace):
            seen.append(trace.id)
            return "enough" if len(seen) == 2 else None

        return await run_load(
            scripted(slots=1), SHORT, burst(), LoadOptions(num_requests=10), on_finish=watch
        )

    run = in_virtual_time(main())
    ends = [outcome(r) for r in run.requests]
    assert ends.count("ok") == 2
    assert ends.count("cancelled") == 8
    assert {r.error for r in run.requests if r.error} == {"cancelled: enough"}
    assert run.duration_s == approx(0.24)


def test_grace_period_ends_hanging_requests(in_virtual_time, scripted):
    run = load(in_virtual_time, lambda: scripted(slots=1), burst(), num_requests=5, grace_s=0.3)
    assert [outcome(r) for r in run.requests].count("cancelled") == 3
    assert run.duration_s == approx(0.3)


def test_a_cancelled_run_leaves_no_task_behind(in_virtual_time, scripted):
    async def main():
        task = asyncio.ensure_future(
            run_load(scripted(slots=1), SHORT, burst(), LoadOptions(num_requests=9))
        )
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert in_virtual_time(main()) == set()


def test_warm_up_leaves_no_record_and_sends_other_prompts(in_virtual_time, scripted):
    async def main():
        target = scripted()
        options = LoadOptions(num_requests=4, num_warmups=3)
        return target, await run_load(target, SHORT, Closed(2), options)

    target, run = in_virtual_time(main())
    assert (len(target.served), len(run.requests)) == (7, 4)
    warm, measured = target.served[:3], target.served[3:]
    assert not {r.prompt for r in warm} & {r.prompt for r in measured}
    assert min(r.scheduled_s for r in run.requests) == approx(0.0)


def test_monitors_start_after_the_warm_up(in_virtual_time, scripted):
    served = []

    async def main():
        target = scripted()

        async def begin():
            served.append(len(target.served))

        options = LoadOptions(num_requests=4, num_warmups=3)
        await run_load(target, SHORT, Closed(2), options, on_start=begin)
        served.append(len(target.served))

    in_virtual_time(main())
    assert served == [3, 7]


def test_a_failing_warm_up_ends_the_run_before_it_begins(in_virtual_time, scripted):
    with pytest.raises(EngineUnavailable, match="warm-up request failed: no such model"):
        load(
            in_virtual_time,
            lambda: scripted(fail=lambda request: "no such model"),
            burst(),
            num_warmups=2,
        )


def test_the_client_measures_its_own_share(in_virtual_time, scripted):
    spent = iter([10.0, 10.5])

    async def main():
        options = LoadOptions(num_requests=2)
        return await run_load(
            scripted(), SHORT, constant(1.0), options, cpu_time=lambda: next(spent)
        )

    run = in_virtual_time(main())
    assert run.client_cpu_share == approx(0.5 / run.duration_s)


def test_equal_seeds_give_equal_loads(in_virtual_time, scripted):
    def prompts(seed):
        run = load(in_virtual_time, scripted, poisson(5.0), num_requests=9, seed=seed)
        return [(r.id, r.scheduled_s) for r in run.requests]

    assert prompts(1) == prompts(1)
    assert prompts(1) != prompts(2)


@pytest.mark.parametrize(
    "options",
    [
        {"num_requests": None},
        {"num_requests": 0},
        {"duration_s": 0.0},
        {"duration_s": float("nan")},
        {"max_concurrency": 0},
        {"timeout_s": 0.0},
        {"num_warmups": -1},
        {"num_requests": 10**11},
        {"num_warmups": 10**11},
        {"grace_s": float("nan")},
    ],
)
def test_contradictory_load_is_rejected(options):
    with pytest.raises(BadInput):
        LoadOptions(**options)


def test_waiting_for_the_cap_is_not_client_lag(in_virtual_time, scripted):
    """Several slots may come free before the first in the queue is sent: none of them is late."""
    run = load(in_virtual_time, scripted, constant(1000.0), num_requests=30, max_concurrency=3)
    assert summarise(run).client_queue.max > 0.5
    assert run.send_lag_p99_s == approx(0.0)
    assert all(r.sent_s >= r.scheduled_s for r in run.requests)


def test_request_that_never_started_is_recorded(in_virtual_time, scripted):
    run = load(in_virtual_time, scripted, burst(), num_requests=2, grace_s=0.0)
    assert [outcome(r) for r in run.requests] == ["cancelled", "cancelled"]
