"""Injected faults are found, a healthy engine has no finding, and every cause of the table occurs.

The truth is known because it was put there. At least 12 faults on 3 workloads, and the right name
for 90 % of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec
import pytest

from ridgeline.diagnose import attribute_latency, facts_of, findings, step_facts
from ridgeline.diagnose.rules.rulebook import shipped_rules
from ridgeline.records import Slo
from tests.diagnose.faults import DECODING, FAULTS, LOADS, OVERLOADED, Engine, diagnosed, run

pytestmark = pytest.mark.slow

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


def test_every_cause_is_found_with_all_its_texts() -> None:
    """Every row of the table is found for its fault, with its numbers filled in."""
    heard: Counter[str] = Counter()
    for fault in FAULTS:
        for load in LOADS:
            for each in diagnosed(fault.change(Engine(), load), load, 0, fault.slo)[0]:
                heard[each.cause] += 1
                assert "unknown" not in each.sentence and "{" not in each.sentence
                assert each.gain.low <= each.gain.mid <= each.gain.high
                assert each.flag and each.fix and each.not_help
                assert all(value is not None for value in each.evidence.values())
    by_losses = {rule.id for rule in shipped_rules() if rule.losses}
    assert by_losses - set(heard) == BY_SLO | BY_GPU | BY_MACHINE


BY_SLO = {"decode-reads-weights", "prompts-are-computed-slowly"}
BY_MACHINE = {"machine-busy"}  # test_busy_machine_finding.py
BY_GPU = {"gpu-waits-for-the-host", "gpu-slowed-down"}  # test_gpu_losses.py


@pytest.mark.parametrize(
    ("cause", "slo", "change"),
    [
        ("decode-reads-weights", "ttft:1500 tpot:10", {}),
        ("prompts-are-computed-slowly", "ttft:150 tpot:500", {"token_s": 0.004, "budget": 1024}),
    ],
)
def test_healthy_engine_below_its_slo_names_the_bound(cause, slo, change) -> None:
    """Without a fault, the bound itself is the finding, but only if an SLO is missed."""
    load = LOADS[1] if not change else replace(LOADS[1], rate=0.4, count=40)
    slow = replace(Engine(), **change)
    assert cause in [e.cause for e in diagnosed(slow, load, 0, Slo.parse(slo))[0]]
    assert cause not in [e.cause for e in diagnosed(slow, load, 0, LAX)[0]]


LAX = Slo.parse("ttft:60000 tpot:6000")


def test_losses_add_up_to_the_latency() -> None:
    for load in LOADS:
        for engine in (Engine(), replace(Engine(), slots=2), replace(Engine(), plan_s=0.02)):
            _, found = diagnosed(engine, load)
            assert 0.9 < sum(share.mid for share in found.shares.values()) < 1.001


def test_gain_is_an_upper_bound_of_what_the_fix_recovers() -> None:
    """ "Up to": the share lost to the scheduler's sleep against the latency without it."""
    load, broken = LOADS[0], replace(Engine(), plan_s=0.012)
    ranked, found = diagnosed(broken, load)
    _, fixed = diagnosed(Engine(), load)
    gained = 1 - fixed.total_s / found.total_s
    assert 0.5 * gained < ranked[0].gain.mid < 1.2 * gained


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("engine", "pays"), [(OVERLOADED, False), (replace(Engine(), slots=2), True)]
)
def test_more_slots_are_advised_only_if_they_add_throughput(engine, pays, seed: int) -> None:
    """Against the same engine with twice the slots and budget, under the same load."""
    ranked, _ = diagnosed(engine, DECODING, seed, LAX)
    top = ranked[0]
    assert top.cause == ("too-few-slots" if pays else "more-comes-than-can-be-served")
    was = run(engine, DECODING, seed)[0].duration_s
    more = replace(engine, slots=2 * engine.slots, budget=512)
    now = run(more, DECODING, seed)[0].duration_s
    assert (was / now > 1.25) == pays
    if not pays:
        assert was / now == pytest.approx(top.evidence["doubled_batch_gain"], abs=0.05)


def test_slots_are_advised_if_the_batch_gain_is_unknown() -> None:
    record, _ = run(OVERLOADED, LOADS[0])
    found = attribute_latency(record)
    assert found is not None
    known = {**facts_of(record), **step_facts(record)}
    assert "more-comes-than-can-be-served" in [finding.cause for finding in findings(found, known)]
    del known["doubled_batch_gain"]
    assert "too-few-slots" in [finding.cause for finding in findings(found, known)]


def test_wait_grows_with_the_excess_of_arrivals() -> None:
    """At f times what can be served, by f - 1 seconds a second; not at all in a closed loop."""
    load = replace(LOADS[0], count=400)
    record, _ = run(OVERLOADED, load)
    came_s = record.requests[-1].scheduled_s - record.requests[0].scheduled_s
    beyond = record.duration_s / came_s - 1
    assert beyond > 0.5
    assert facts_of(record)["wait_growth_s"] == pytest.approx(beyond, rel=0.1)
    assert "wait_growth_s" not in facts_of(run(Engine(), load)[0])
    closed = msgspec.structs.replace(record, arrivals="closed:8")
    assert "wait_growth_s" not in facts_of(closed)
