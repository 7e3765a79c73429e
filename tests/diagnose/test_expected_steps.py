"""Step times expected from an earlier run: kinds of steps, noise, and a real stall."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from ridgeline.diagnose.facts import READING_GAP_S, facts_of
from ridgeline.diagnose.losses.expected_steps import learn
from ridgeline.diagnose.losses.latency_losses import EXPECTED_NOISE, Expected, attribute_latency
from ridgeline.diagnose.losses.step_facts import step_facts
from ridgeline.diagnose.rules.findings import findings
from ridgeline.records import RunTrace, Slo, StepStat
from tests.diagnose.faults import LOADS, SLO, Engine, diagnosed, run


def decode_steps(seconds, count=60, spread=0.0, seed=0):
    """Steps of one to six sequences, `seconds` by their number."""
    rng = random.Random(seed)
    found, at_s = [], 0.0
    for index in range(count * 6):
        num = 1 + index % 6
        run_s = seconds(num) * rng.uniform(1 - spread, 1 + spread)
        found.append(
            StepStat(
                index=index,
                at_s=at_s,
                plan_s=0.0002,
                run_s=run_s,
                shapes=((1, 50),) * num,
                num_sampled=num,
                num_running=num,
                num_waiting=0,
                used_blocks=1,
                num_blocks=100,
                max_num_seqs=8,
            )
        )
        at_s += run_s + 0.0003
    return found


RECORD = RunTrace(
    target="made up", workload="made up", arrivals="poisson:1.0", seed=0, started_unix_s=0.0,
    duration_s=1.0, requests=(), steps=(),
)  # fmt: skip


def kernel(num):
    """A kernel that takes another path from four sequences on: no line fits it."""
    return 0.002 if num < 4 else 0.0075


def test_nonlinear_kernel_is_fitted_per_kind_of_step() -> None:
    steps = decode_steps(kernel)
    expected = learn(steps)
    assert expected is not None
    assert max(abs(expected.seconds(s) / s.run_s - 1) for s in steps) < 0.1
    assert not any(map(expected.is_slow, steps))
    assert expected.between_s == pytest.approx(0.0003, rel=0.01)


def test_noise_of_the_healthy_run_is_not_called_slow() -> None:
    calm, wild = learn(decode_steps(kernel)), learn(decode_steps(kernel, spread=0.6))
    assert calm is not None and wild is not None
    assert calm.noise == EXPECTED_NOISE and wild.noise > 1.25
    again = decode_steps(kernel, spread=0.6, seed=1)
    slow = sum(map(wild.is_slow, again)) / len(again)
    assert slow < 0.3 < 0.5 < sum(s.run_s > 1.25 * kernel(1) for s in again) / len(again)
    halved = [msgspec.structs.replace(s, run_s=2 * s.run_s) for s in again]
    assert sum(map(wild.is_slow, halved)) / len(halved) > 0.7


@pytest.mark.slow
def test_slow_steps_after_a_pause_are_not_attributed_to_the_machine() -> None:
    healthy = Engine()
    expected = Expected(seconds=lambda s: healthy.expected(s.shapes), between_s=0.00025)
    named = {}
    for plan_s in (0.0002, 0.012):
        record, _ = run(replace(healthy, slower=1.8, plan_s=plan_s), LOADS[0])
        facts = {**facts_of(record, SLO), **step_facts(record, expected), "cpu_taken_share": 0.1}
        found = attribute_latency(record, expected=expected)
        assert found is not None and facts["slow_steps_share"] > 0.5
        named[plan_s] = {finding.cause for finding in findings(found, facts)}
    assert "machine-slower-than-it-was" in named[0.0002] - named[0.012]
    assert "host-between-steps" in named[0.012]


def test_competing_process_slows_all_spans_and_a_stall_one() -> None:
    steps = decode_steps(kernel)
    expected = Expected(seconds=lambda step: kernel(len(step.shapes)))

    def slowed(chosen: Callable[[int], bool]) -> float:
        times = [step.run_s * (3 if chosen(i) else 1) for i, step in enumerate(steps)]
        slow = [msgspec.structs.replace(s, run_s=t) for s, t in zip(steps, times, strict=True)]
        facts = step_facts(msgspec.structs.replace(RECORD, steps=tuple(slow)), expected)
        assert facts["slow_steps_share"] <= 0.5
        return float(facts["slow_spans_share"])

    assert slowed(lambda i: i % 3 == 0) == 1.0
    assert slowed(lambda i: 40 <= i < 100) <= 0.3
    assert slowed(lambda i: False) == 0.0


@pytest.mark.slow
def test_stall_within_the_tpot_slo_is_no_finding() -> None:
    """The same steps, under an SLO that they meet and under one that they violate."""
    load = LOADS[0]
    broken = replace(Engine(), budget=2048, chunked=False, token_s=0.0004)
    ranked, _ = diagnosed(broken, load)
    assert ranked[0].cause == "prefill-stalls-decode"
    ranked, _ = diagnosed(broken, load, 0, Slo.parse("ttft:60000 tpot:6000"))
    assert "prefill-stalls-decode" not in [each.cause for each in ranked]


def test_without_slo_the_reading_pace_is_the_limit() -> None:
    record, _ = run(Engine(), LOADS[0])
    assert facts_of(record)["smooth_gap_s"] == READING_GAP_S
    assert facts_of(record, Slo.parse("tpot:30"))["smooth_gap_s"] == pytest.approx(0.03)
    assert facts_of(record, Slo.parse("ttft:30"))["smooth_gap_s"] == READING_GAP_S


def test_slow_loss_follows_the_expected_step_times() -> None:
    record, _ = run(replace(Engine(), slower=1.3), LOADS[0])
    healthy = Engine()
    strict = Expected(seconds=lambda s: healthy.expected(s.shapes))
    lenient = msgspec.structs.replace(strict, noise=1.6)
    found, spared = (
        attribute_latency(record, expected=strict),
        attribute_latency(record, expected=lenient),
    )
    assert found is not None and spared is not None
    assert found.shares["slow"].mid > 0.1 and spared.shares["slow"].mid == 0
