"""Trimming removes warm-up and drain without introducing a bias."""

from __future__ import annotations

import random
import statistics
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.errors import BadInput
from ridgeline.measure.metrics.latency import e2e_s
from ridgeline.measure.metrics.summary import summarise
from ridgeline.measure.metrics.window import (
    MeasurementWindow,
    trim_to_window,
    window_of,
    window_totals,
)


def steady(request_trace, run_trace, seed=0, count=400, gap_s=0.1):
    """Requests whose length has nothing to do with when they come."""
    rng = random.Random(seed)
    requests = []
    for i in range(count):
        at_s, took_s = i * gap_s, rng.expovariate(1 / 3.0) + 0.05
        token_s = (at_s + took_s / 2, at_s + took_s)
        requests.append(request_trace(id=str(i), scheduled_s=at_s, sent_s=at_s, token_s=token_s))
    return run_trace(requests)


def test_latency_inside_is_that_of_every_request_that_arrived_there(request_trace, run_trace):
    run = steady(request_trace, run_trace)
    window = window_of(run, 4.95, 5.05)
    inside = trim_to_window(run, window)
    chosen = run.requests[50:349]  # one each 0.1 s; the last arrives at 39.9
    assert inside.requests == chosen
    mean = statistics.fmean(map(e2e_s, inside.requests))
    ended_inside = [e2e_s(r) for r in chosen if r.finished_s < window.end_s]
    assert statistics.fmean(ended_inside) < 0.97 * mean  # what choosing by completion would do


def test_rates_count_what_happened_in_the_window(request_trace, run_trace):
    run = steady(request_trace, run_trace)
    found = summarise(run, window=window_of(run, 12.0, 2.0))
    assert found.output_tok_s == pytest.approx(20.0, rel=0.1)  # ten requests/s of two tokens
    assert found.request_rate == pytest.approx(10.0, rel=0.1)
    assert summarise(run).output_tok_s < 0.9 * found.output_tok_s  # the drain is in there


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(1.0, 39.0), min_size=1, max_size=5, unique=True))
def test_adjacent_windows_count_every_token_once(cuts):
    from tests.measure.conftest import _request, _run

    run = steady(_request, _run)
    edges = [0.0, *sorted(cuts), 1e9]
    parts = [MeasurementWindow(a, b) for a, b in pairwise(edges)]
    flows = [window_totals(run, part) for part in parts]
    assert sum(len(trim_to_window(run, part).requests) for part in parts) == len(run.requests)
    assert sum(flow.output_tokens for flow in flows) == 800
    assert sum(flow.completions for flow in flows) == 400


def test_trimming_nothing_and_trimming_everything(request_trace, run_trace):
    run = steady(request_trace, run_trace)
    assert window_of(run, 0.0, 0.0) is None
    with pytest.raises(BadInput, match="no request arrived"):
        window_of(run, 30.0, 30.0)
    with pytest.raises(BadInput, match="negative"):
        window_of(run, -1.0, 0.0)
