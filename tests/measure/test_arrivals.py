"""Arrival processes: statistics with fixed seeds, labels that read back, flags."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.errors import BadInput
from ridgeline.measure.workload.arrivals import (
    Closed,
    Renewal,
    arrivals_from_flags,
    burst,
    constant,
    gamma,
    parse_arrivals,
    poisson,
)


def instants(process, count, seed=0):
    due = process.start(seed)
    return [due.next(0.0, 0) for _ in range(count)]


def gaps(process, count, seed=0):
    at = instants(process, count + 1, seed)
    return [b - a for a, b in pairwise(at)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_requested_rate_and_variation(burstiness):
    found = gaps(gamma(5.0, burstiness), 20_000, seed=3)
    cv = statistics.pstdev(found) / statistics.fmean(found)
    assert statistics.fmean(found) == pytest.approx(1 / 5, rel=0.03)
    assert cv == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_poisson_counts_have_variance_equal_to_mean():
    at = instants(poisson(4.0), 20_000, seed=11)
    counts = [0] * int(at[-1])
    for t in at:
        if t < len(counts):
            counts[int(t)] += 1
    assert statistics.pvariance(counts) / statistics.fmean(counts) == pytest.approx(1, rel=0.1)


def test_poisson_gaps_are_exponential():
    found = gaps(poisson(2.0), 20_000, seed=5)
    assert sum(gap > 0.5 for gap in found) / len(found) == pytest.approx(math.exp(-1), rel=0.03)


def test_constant_is_exact_and_burst_is_at_once():
    assert instants(constant(4.0), 4) == [0.0, 0.25, 0.5, 0.75]
    assert instants(burst(), 3) == [0.0, 0.0, 0.0]


def test_seed_determines_the_arrivals():
    assert instants(poisson(1.0), 50, seed=1) == instants(poisson(1.0), 50, seed=1)
    assert instants(poisson(1.0), 50, seed=1) != instants(poisson(1.0), 50, seed=2)


def test_closed_loop_waits_for_a_slot():
    due = Closed(2).start(0)
    assert due.next(1.5, 1) == 1.5
    assert due.next(1.5, 2) is None


@pytest.mark.parametrize(
    "label", ["closed:8", "constant:4.0", "poisson:2.5", "gamma:4.0:0.5", "burst"]
)
def test_labels_read_back(label):
    assert parse_arrivals(label).label == label


@given(st.floats(1e-3, 1e6), st.floats(1e-2, 1e2))
def test_any_process_reads_back(rate, burstiness):
    process = gamma(rate, burstiness)
    assert parse_arrivals(process.label) == process


MALFORMED = (
    "",
    "poison:4",
    "poisson",
    "poisson:x",
    "poisson:0",
    "poisson:-1",
    "poisson:nan",
    "closed:0",
    "closed:1.5",
    "closed:8:8",
    "gamma:4",
    "gamma:4:0",
    "burst:3",
)


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_arrivals_are_refused(text):
    with pytest.raises(BadInput):
        parse_arrivals(text)


def test_flags():
    assert arrivals_from_flags() == burst()
    assert arrivals_from_flags(max_concurrency=8) == Closed(8)
    assert arrivals_from_flags(4.0, 1.0, 8) == poisson(4.0)
    assert arrivals_from_flags(4.0, 0.5) == Renewal(4.0, 0.5)
    assert arrivals_from_flags(4.0, math.inf).label == "constant:4.0"
    for rate in (0.0, -math.inf, math.nan):
        with pytest.raises(BadInput):
            arrivals_from_flags(rate)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 3.0, math.inf])
def test_equal_seeds_give_equal_gaps_up_to_the_rate(burstiness):
    slow, fast = (gaps(gamma(rate, burstiness), 50, seed=7) for rate in (1.0, 8.0))
    assert slow == pytest.approx([8 * gap for gap in fast])
