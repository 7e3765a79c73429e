"""Goodput search over servers whose capacity is known, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ridgeline.errors import BadInput
from ridgeline.measure.client.load_client import LoadOptions, run_load
from ridgeline.measure.goodput_search import (
    MissBudget,
    find_goodput,
    is_saturated,
    min_requests_per_run,
)
from ridgeline.measure.metrics.goodput import goodput
from ridgeline.measure.workload import parse_workload
from ridgeline.measure.workload.arrivals import Closed, constant, poisson
from ridgeline.records import Slo
from ridgeline.stats import wilson_interval

WORK = parse_workload("synthetic:input=8,output=3")
SLO = Slo.parse("ttft:300")


def searching(in_virtual_time, target, slo=SLO, *, make=constant, low=1.0, high=1000.0, n=60, **kw):
    """Search a scripted server; time is the loop's."""
    import asyncio

    async def main():
        async def run_at(load):
            options = LoadOptions(num_requests=n, grace_s=30.0)
            return await run_load(target(), WORK, make(load), options)

        clock = asyncio.get_running_loop().time
        return await find_goodput(
            run_at, slo, low, high, kw.pop("budget_s", 1e6), clock=clock, **kw
        )

    return in_virtual_time(main())


def test_finds_the_capacity_of_a_server(in_virtual_time, scripted):
    # one slot, 0.12 s per request: 8.33 requests/s
    found = searching(in_virtual_time, lambda: scripted(slots=1), tolerance=0.05)
    assert found.stopped == "tolerance"
    assert found.load is not None
    assert found.failed_load is not None
    assert 7.5 < found.load <= 8.9
    assert found.load < found.failed_load <= 1.05 * found.load + 1e-9
    assert found.goodput_req_s == pytest.approx(found.load, rel=0.15)
    assert len(found.probes) <= 9
    assert all(probe.reason for probe in found.probes if not probe.holds)


def lucky(share, n=100):
    """A run of `n` requests with the given number in time, at any rate."""

    def make(request_trace, run_trace):
        late = round(n * (1 - share))
        requests = [
            request_trace(
                id=str(i), scheduled_s=float(i), token_s=(i + (9.0 if i < late else 0.1), i + 9.1)
            )
            for i in range(n)
        ]
        return run_trace(requests, arrivals="closed:1", duration_s=float(n))

    return make


@pytest.mark.parametrize(
    ("shares", "num_runs", "holds"),
    [
        ([1.0], 1, True),  # 100 of 100: at least 96.3 %
        ([0.7], 1, False),  # at most 78 %
        ([0.97, 0.99, 0.98], 3, True),  # 294 of 300: at least 95.7 %
        ([0.97, 0.97, 0.97], 3, False),  # 291 of 300 may be 94.4 %
        ([0.97, 0.80], 2, False),  # and 88.5 % may not be 95 %
    ],
)
async def test_goodput_is_not_claimed_without_enough_evidence(
    request_trace, run_trace, shares, num_runs, holds
):
    left = iter(shares)

    async def run_at(load):
        return lucky(next(left))(request_trace, run_trace)

    slo = Slo.parse("ttft:300")
    found = await find_goodput(run_at, slo, 1.0, 1.0, 1e6, prove_within=3)
    (probe,) = found.probes
    assert probe.holds is holds and probe.goodput.num_requests == 100 * num_runs
    assert list(left) == []
    if num_runs == 3 and not holds:
        assert probe.reason == "not proved: attainment 97.0% [94.4%, 98.4%]"


def test_number_of_requests_needed_to_verify_an_slo():
    for text, runs in (("ttft:300", 1), ("ttft:300", 3), ("ttft:300 attainment:99%", 3)):
        slo = Slo.parse(text)
        least = min_requests_per_run(slo, runs)
        assert wilson_interval(runs * least, runs * least).low >= slo.attainment
        assert wilson_interval(runs * (least - 1), runs * (least - 1)).low < slo.attainment
    assert min_requests_per_run(Slo.parse("ttft:300 attainment:100%"), 3) is None


def test_a_faster_server_carries_more(in_virtual_time, scripted):
    slow = searching(in_virtual_time, lambda: scripted(slots=1), make=poisson)
    fast = searching(in_virtual_time, lambda: scripted(slots=4), make=poisson)
    assert fast.goodput_req_s > 2 * slow.goodput_req_s


def test_impossible_slo_is_infeasible_after_one_probe(in_virtual_time, scripted):
    found = searching(in_virtual_time, scripted, Slo.parse("ttft:50"))
    assert (found.stopped, len(found.probes), found.best) == ("infeasible", 1, None)
    assert found.goodput_req_s == 0.0
    assert "attainment 0%" in found.probes[0].reason
    assert "ttft x60" in found.probes[0].reason


def test_failing_server_is_limited_by_the_error_rate(in_virtual_time, scripted):
    found = searching(in_virtual_time, lambda: scripted(fail=lambda request: "HTTP 500"))
    assert found.probes[0].reason == "100% of requests failed (limit 0%)"


def test_the_upper_end_is_tried_and_reported(in_virtual_time, scripted):
    found = searching(in_virtual_time, scripted, low=1.0, high=5.0)
    assert (found.stopped, found.load) == ("high", 5.0)
    assert [probe.load for probe in found.probes] == [1.0, 2.0, 4.0, 5.0]


def test_lax_slo_does_not_hide_saturation(in_virtual_time, scripted):
    """Sixty requests at 64/s against 8.3/s wait at most 7 s: in time, yet not sustainable."""
    found = searching(in_virtual_time, lambda: scripted(slots=1), Slo.parse("ttft:60000"))
    assert found.load is not None
    assert found.load < 12
    assert any("saturated" in probe.reason for probe in found.probes)


def test_saturation_needs_both_signs(in_virtual_time, scripted):
    async def one(rate):
        options = LoadOptions(num_requests=40)
        return await run_load(scripted(slots=1), WORK, constant(rate), options)

    assert is_saturated(in_virtual_time(one(40.0)))
    assert not is_saturated(in_virtual_time(one(8.0)))


def test_a_closed_loop_searches_whole_users_and_stops_on_the_plateau(in_virtual_time, scripted):
    found = searching(
        in_virtual_time,
        lambda: scripted(slots=4),
        Slo.parse("ttft:60000"),
        make=lambda users: Closed(int(users)),
        whole=True,
    )
    assert found.stopped == "plateau"
    assert found.load == 8.0  # 4 and 8 users bring the same: no more is tried
    strict = searching(
        in_virtual_time,
        lambda: scripted(slots=4),
        Slo.parse("ttft:180"),
        make=lambda users: Closed(int(users)),
        whole=True,
    )
    assert all(probe.load == int(probe.load) for probe in strict.probes)
    assert strict.load in (4.0, 5.0, 6.0)


def test_time_budget_is_kept_but_one_probe_always_runs(in_virtual_time, scripted):
    found = searching(in_virtual_time, lambda: scripted(slots=1), budget_s=100.0)
    assert found.stopped == "budget"
    assert sum(probe.took_s for probe in found.probes) <= 100.0
    one = searching(in_virtual_time, lambda: scripted(slots=1), budget_s=0.0)
    assert (one.stopped, len(one.probes)) == ("budget", 1)


def test_the_number_of_probes_is_limited(in_virtual_time, scripted):
    found = searching(in_virtual_time, lambda: scripted(slots=1), tolerance=1e-6, max_probes=5)
    assert (found.stopped, len(found.probes)) == ("probes", 5)


def test_every_probe_is_shown_as_it_ends(in_virtual_time, scripted):
    seen = []
    found = searching(in_virtual_time, scripted, high=2.0, on_probe=seen.append)
    assert tuple(seen) == found.probes


@pytest.mark.parametrize("limits", [(0.0, 1.0), (2.0, 1.0), (1.0, float("inf"))])
def test_empty_search_range_is_rejected(in_virtual_time, scripted, limits):
    with pytest.raises(BadInput, match="0 < low <= high"):
        searching(in_virtual_time, scripted, low=limits[0], high=limits[1])


def test_early_abort_saves_time_and_keeps_the_verdict(in_virtual_time, scripted):
    async def one(rate, watch):
        options = LoadOptions(num_requests=60)
        target = scripted(slots=1)
        return await run_load(target, WORK, constant(rate), options, on_finish=watch)

    for rate in (4.0, 8.0, 9.0, 12.0, 30.0):
        whole = in_virtual_time(one(rate, None))
        cut = in_virtual_time(one(rate, MissBudget(SLO, 60)))
        assert goodput(whole, SLO).holds == goodput(cut, SLO).holds
        assert cut.duration_s <= whole.duration_s
    assert cut.duration_s < 0.5 * whole.duration_s


@pytest.mark.slow
@given(
    st.integers(1, 200), st.floats(0.5, 1.0), st.lists(st.booleans(), min_size=200, max_size=200)
)
@example(6, 0.5000000000000001, [True] * 3 + [False] * 197)  # a hair above a reachable share
def test_the_miss_budget_is_exact(request_trace, run_trace, total, attainment, kept):
    slo = Slo(ttft_s=0.25, attainment=attainment, error_rate=1.0)
    requests = [request_trace(token_s=(0.2 if ok else 0.3, 0.4)) for ok in kept[:total]]
    budget = MissBudget(slo, total)
    stopped = [request for request in requests if budget(request) is not None]
    assert bool(stopped) != goodput(run_trace(requests), slo).holds
