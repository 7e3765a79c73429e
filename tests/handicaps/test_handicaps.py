"""Planted faults of other servers are found, on twins on a virtual clock.

All twenty are run by benchmarks/bench_handicaps.py; here each is checked to be mendable, and a few
are searched.
"""

from __future__ import annotations

import pytest

from ridgeline.errors import UserError
from tests.handicaps.handicaps import HANDICAPS, Handicap, Truth
from tests.handicaps.suite import LOSS, judge, search

SEARCHED = ("vllm prefix", "sglang prefix", "llama.cpp one slot")


@pytest.mark.parametrize("handicap", HANDICAPS, ids=lambda handicap: handicap.name)
def test_every_fault_is_planted_and_a_rung_or_the_defaults_mend_it(handicap: Handicap) -> None:
    truth = Truth(handicap)
    servers = truth.servers
    start = servers.config(servers.start)
    settings = [servers.defaults, *(c.settings for c in truth.neighbours(servers.start))]
    configs = []
    for candidate in settings:
        try:
            configs.append(servers.config(candidate))
        except UserError:
            continue  # a server that does not start
    for fault in handicap.faults:
        assert not fault.mended(start, start), fault.name
        assert any(fault.mended(start, config) for config in configs), fault.name


@pytest.mark.slow
@pytest.mark.parametrize(
    "handicap", [h for h in HANDICAPS if h.name in SEARCHED], ids=lambda handicap: handicap.name
)
def test_search_mends_the_fault(handicap: Handicap) -> None:
    result, virtual_s = search(handicap)
    truth = Truth(handicap)
    outcome = judge(handicap, result, virtual_s, best_known=False, baselines=False)
    assert outcome.found_at is not None and outcome.found_at <= 2
    assert outcome.num_mended == len(handicap.faults)
    assert not outcome.false_keeps
    assert outcome.final > 1.5 * outcome.start
    assert outcome.final >= LOSS * truth.goodput(truth.servers.defaults)
