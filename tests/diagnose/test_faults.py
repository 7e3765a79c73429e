"""Injected faults are named, a healthy engine gets no finding, and every cause of the table speaks.

The truth is known because it was put there. At least 12 faults on 3 workloads, and the right name
for 90 % of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from ridgeline.diagnose.causes import shipped_causes
from ridgeline.records import Slo
from tests.diagnose.faults import FAULTS, LOADS, Engine, diagnosed

SEEDS = (0, 1)


def tops(seed: int) -> dict[tuple[str, str], tuple[str, ...]]:
    found = {}
    for fault in FAULTS:
        for load in LOADS:
            ranked, _ = diagnosed(fault.change(Engine(), load), load, seed, fault.slo)
            found[fault.name, load.name] = tuple(each.verdict for each in ranked)
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_the_top_finding_names_the_fault(seed: int) -> None:
    assert len(FAULTS) >= 12 and len(LOADS) >= 3
    found = tops(seed)
    truth = {fault.name: fault.verdict for fault in FAULTS}
    wrong = {key: named for key, named in found.items() if named[:1] != (truth[key[0]],)}
    assert len(wrong) <= 0.1 * len(found), wrong


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_a_healthy_engine_gets_no_finding(load, seed: int) -> None:
    ranked, found = diagnosed(Engine(), load, seed)
    assert [each.cause for each in ranked] == [], found.shares


def test_every_cause_is_heard_and_told_whole() -> None:
    """Each row of the table speaks for a fault of its own, with its numbers filled in."""
    heard: Counter[str] = Counter()
    for fault in FAULTS:
        for load in LOADS:
            for each in diagnosed(fault.change(Engine(), load), load, 0, fault.slo)[0]:
                heard[each.cause] += 1
                assert "unknown" not in each.sentence and "{" not in each.sentence
                assert each.gain.low <= each.gain.mid <= each.gain.high
                assert each.flag and each.fix and each.not_help
                assert all(value is not None for value in each.evidence.values())
    assert {cause.id for cause in shipped_causes()} - set(heard) == BY_PROMISE | BY_GPU


BY_PROMISE = {"decode-reads-weights", "prompts-are-computed-slowly"}
BY_GPU = {"gpu-waits-for-the-host", "gpu-slowed-down"}  # test_from_gpu.py


@pytest.mark.parametrize(
    ("cause", "promise", "change"),
    [
        ("decode-reads-weights", "ttft:1500 tpot:10", {}),
        ("prompts-are-computed-slowly", "ttft:150 tpot:500", {"token_s": 0.004, "budget": 1024}),
    ],
)
def test_a_healthy_engine_under_a_promise_it_cannot_keep(cause, promise, change) -> None:
    """Nothing is broken: the bound itself is named, and only because a promise is missed."""
    load = LOADS[1] if not change else replace(LOADS[1], rate=0.4, count=40)
    slow = replace(Engine(), **change)
    assert cause in [e.cause for e in diagnosed(slow, load, 0, Slo.parse(promise))[0]]
    assert cause not in [e.cause for e in diagnosed(slow, load, 0, LAX)[0]]


LAX = Slo.parse("ttft:60000 tpot:6000")


def test_losses_add_up_to_the_latency() -> None:
    for load in LOADS:
        for engine in (Engine(), replace(Engine(), seats=2), replace(Engine(), plan_s=0.02)):
            _, found = diagnosed(engine, load)
            assert 0.9 < sum(share.mid for share in found.shares.values()) < 1.001


def test_the_predicted_gain_is_not_less_than_what_mending_brings() -> None:
    """ "Up to": the share lost to the scheduler's sleep against the latency without it."""
    load, broken = LOADS[0], replace(Engine(), plan_s=0.012)
    ranked, found = diagnosed(broken, load)
    _, mended = diagnosed(Engine(), load)
    gained = 1 - mended.total_s / found.total_s
    assert 0.5 * gained < ranked[0].gain.mid < 1.2 * gained
