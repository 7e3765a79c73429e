"""The simulator against sums by hand, and the fit of step times against a known truth."""

from __future__ import annotations

import random

import msgspec
import pytest

from ridgeline.engine.scheduler.admission.limits import SchedulerLimits
from ridgeline.engine.scheduler.batching import make_policy
from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.prefix_cache import NoPrefixCache, PrefixCache
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.errors import BadInput
from ridgeline.plan.calibration.roofline_fit import StepSample, fit_step_time
from ridgeline.plan.simulate.single import Arrival, simulate

STEP_S = 0.01


def scheduler(*, slots: int = 4, batching: str = "continuous", reuse: bool = False) -> Scheduler:
    pool = BlockPool(200, 16)
    limits = SchedulerLimits(
        max_num_seqs=slots, max_num_batched_tokens=256, max_model_len=512, chunked_prefill=True
    )
    cache = PrefixCache(pool, None) if reuse else NoPrefixCache()
    return Scheduler(limits, make_policy(batching), pool, cache)


def every_step(shapes: object, num_sampled: int) -> float:
    return STEP_S


def arrivals(count: int, gap_s: float = 0.0, prompt: int = 40, output: int = 5) -> list[Arrival]:
    rng = random.Random(3)
    return [
        Arrival(
            at_s=i * gap_s,
            prompt=tuple(rng.randrange(100) for _ in range(prompt)),
            num_output=output,
        )
        for i in range(count)
    ]


def test_single_request_takes_its_own_steps() -> None:
    found = simulate(scheduler(), arrivals(1), every_step, end_s=10)
    (request,) = found.requests
    assert request.token_s == pytest.approx([STEP_S * (i + 1) for i in range(5)])
    assert request.error is None and request.output_tokens == 5 and len(found.steps) == 5


def test_one_slot_serves_sequentially_and_four_slots_together() -> None:
    alone = simulate(scheduler(slots=1, batching="static"), arrivals(4), every_step, end_s=10)
    together = simulate(scheduler(slots=4), arrivals(4), every_step, end_s=10)
    assert alone.duration_s == pytest.approx(4 * 5 * STEP_S)
    assert together.duration_s == pytest.approx(5 * STEP_S)


def test_closed_loop_sends_the_next_request_after_an_answer() -> None:
    found = simulate(scheduler(), arrivals(6), every_step, end_s=10, concurrency=2)
    assert [r.sent_s for r in found.requests] == pytest.approx(
        [5 * STEP_S * (i // 2) for i in range(6)]
    )
    assert all(r.scheduled_s == r.sent_s and r.error is None for r in found.requests)
    assert max(step.num_running + step.num_waiting for step in found.steps) == 2


def test_closed_loop_omits_requests_that_were_never_sent() -> None:
    found = simulate(scheduler(), arrivals(6), every_step, end_s=0.06, concurrency=2)
    assert [r.error is None for r in found.requests] == [True, True, False, False]
    with pytest.raises(BadInput, match="concurrency"):
        simulate(scheduler(), arrivals(6), every_step, end_s=1, concurrency=0)


def test_idle_time_is_skipped() -> None:
    found = simulate(scheduler(), arrivals(2, gap_s=100.0), every_step, end_s=1000)
    assert found.requests[1].token_s[0] == pytest.approx(100.0 + STEP_S)
    assert len(found.steps) == 10


def test_simulation_uses_the_real_prefix_cache() -> None:
    asked = arrivals(1, prompt=64) * 2
    later = Arrival(at_s=1.0, prompt=asked[0].prompt, num_output=5)
    found = simulate(scheduler(reuse=True), [asked[0], later], every_step, end_s=10)
    assert [request.cached_tokens for request in found.requests] == [0, 48]


def test_requests_unfinished_at_the_end_have_failed() -> None:
    found = simulate(scheduler(slots=1), arrivals(3), every_step, end_s=0.06)
    assert [request.error is None for request in found.requests] == [True, False, False]


def test_request_that_can_never_fit_is_rejected() -> None:
    with pytest.raises(BadInput):
        simulate(scheduler(), arrivals(1, prompt=600), every_step, end_s=1)


def samples(noise: float, seed: int = 0) -> list[StepSample]:
    rng = random.Random(seed)
    made = []
    for _ in range(200):
        bound_s, runs = rng.uniform(1e-4, 1e-2), rng.randrange(1, 32)
        tokens = runs + rng.choice((0, 0, 128))
        truth = 1.5 * bound_s + 2e-3 + 1e-4 * runs + 1e-5 * tokens
        made.append(StepSample(bound_s, runs, tokens, truth * (1 + rng.gauss(0, noise))))
    return made


def test_fit_recovers_the_terms() -> None:
    found = fit_step_time(samples(0.0))
    assert found is not None
    assert found.alpha == pytest.approx(1.5, rel=1e-3)
    assert found.step_s == pytest.approx(2e-3, rel=1e-3)
    assert found.run_s == pytest.approx(1e-4, rel=1e-2)
    assert found.token_s == pytest.approx(1e-5, rel=1e-2)


def test_fit_predicts_despite_noise_and_outliers() -> None:
    noisy = samples(0.1)
    noisy[::50] = [StepSample(s.bound_s, s.num_runs, s.num_tokens, 1.0) for s in noisy[::50]]
    found = fit_step_time(noisy)
    assert found is not None
    for truth in samples(0.0, seed=1):
        predicted = found.seconds(truth.bound_s, truth.num_runs, truth.num_tokens)
        assert predicted == pytest.approx(truth.seconds, rel=0.15)


def test_single_request_samples_do_not_determine_the_cost_of_a_run() -> None:
    found = fit_step_time([msgspec.structs.replace(s, num_runs=1) for s in samples(0.0)])
    assert found is not None
    assert found.run_s == 0.0 and found.step_s > 0


def test_too_few_samples_give_no_fit() -> None:
    assert fit_step_time(samples(0.0)[:7]) is None
