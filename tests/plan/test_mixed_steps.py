"""Steps with prompts among decodes: their mean, and pipelines against one played stage by stage."""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline.hardware.catalogue import find_accelerator
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.plan.step_time.mixed_steps import MixedSteps
from ridgeline.plan.step_time.operating_point import OperatingPoint
from ridgeline.plan.step_time.parallel_layout import Layout
from ridgeline.plan.step_time.predict import decode_step_s, mixed_steps, predict, time_point
from ridgeline.plan.step_time.replica import build_replica

DEVICE = find_accelerator("h100-sxm")


def point(**fields: object) -> OperatingPoint:
    base = {"model": "llama-3.1-8b", "device": "h100-sxm", "isl": 1024, "osl": 64, "batch": 16}
    return OperatingPoint(**{**base, **fields})  # type: ignore[arg-type]


def mixed(pp: int = 1, **fields: object) -> MixedSteps:
    return mixed_steps(
        build_replica(load_planning_spec("llama-3.1-8b"), DEVICE, Layout(pp=pp)), point(**fields)
    )


def test_step_time_interpolates_between_whole_numbers_of_prompts() -> None:
    steps = mixed()
    none, one, two = (steps.seconds(chunks) for chunks in (0, 1, 2))
    assert none < one < two
    assert steps.seconds(0.25) == pytest.approx(0.75 * none + 0.25 * one)
    assert steps.seconds(1.5) == pytest.approx((one + two) / 2)
    assert steps.prompt_s == one  # one chunk
    assert steps.added_s == one - none


def test_random_arrivals_cost_the_mean_over_their_counts() -> None:
    steps = mixed(isl=128)
    drawn = np.random.default_rng(5).poisson(1.3, 20_000)
    mean_s = float(np.mean([steps.seconds(n) for n in drawn]))
    assert steps.poisson_seconds(1.3) == pytest.approx(mean_s, rel=0.01)
    assert steps.poisson_seconds(1.3) > steps.seconds(1.3)


def test_long_prompt_is_computed_in_chunks() -> None:
    steps = mixed(isl=4000, max_num_batched_tokens=1024)
    assert steps.num_chunks == 4 and 1 <= steps.max_chunks < 1.02
    assert steps.prompt_s > 4 * 0.9 * steps.seconds(1)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.4, 0.9, 1.0])
@pytest.mark.parametrize("pp", [2, 4])
def test_pipeline_round_takes_as_long_as_its_longest_step(pp: int, share: float) -> None:
    """Micro-batches pass through the stages in order.

    A step takes 1/pp of its time on each stage.
    """
    steps = mixed(pp=pp, batch=64)
    none, one = steps.seconds(0), steps.seconds(1)
    rounds = 4000
    long = np.random.default_rng(3).random((rounds, pp)) < share
    free_s, ended_s = [0.0] * pp, [0.0] * pp  # each stage, each micro-batch
    for row in long:
        for each, is_long in enumerate(row):
            at_s = ended_s[each]
            for stage in range(pp):
                at_s = max(at_s, free_s[stage]) + (one if is_long else none) / pp
                free_s[stage] = at_s
            ended_s[each] = at_s
    assert steps.seconds(share) == pytest.approx(max(ended_s) / rounds, rel=0.05)


def test_pipeline_stages_add_room_for_prompts() -> None:
    """One stage that is full of prompts, and four: the pipeline takes in nearly four times as many,
    while a rare prompt still delays all of them."""
    busy = point(isl=4000, osl=2, batch=64)
    one, four = (
        time_point(build_replica(load_planning_spec("llama-3.1-8b"), DEVICE, Layout(pp=pp)), busy)
        for pp in (1, 4)
    )
    assert 3.5 < four.output_tok_s / one.output_tok_s <= 4.1
    rare = point(osl=4096, batch=4)
    machine = build_replica(load_planning_spec("llama-3.1-8b"), DEVICE, Layout(pp=4))
    late_s = time_point(machine, rare).tpot_s - decode_step_s(machine, rare)
    assert late_s == pytest.approx(3 / 4096 * mixed_steps(machine, rare).added_s, rel=0.01)


def test_all_prompts_of_a_closed_loop_take_device_time() -> None:
    """One-token answers of 4,000 tokens are at most as many as the device has FLOPs for: 32 prompts
    at once cannot be answered in the time of one."""
    alone, many = (predict(point(isl=4000, osl=1, batch=batch)) for batch in (1, 32))
    assert many.output_tok_s < 1.1 * alone.output_tok_s
    assert many.tpot_ms / 1000 < 8192 / 4000 * 1.1 / alone.output_tok_s  # one full step
