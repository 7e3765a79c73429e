"""The optimiser's simulator predicts what it has measured, and nothing else."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import msgspec
import pytest

from ridgeline.config.settings import Settings, Speculative
from ridgeline.engine.scheduler.admission.limits import SchedulerLimits
from ridgeline.engine.scheduler.batching import make_policy
from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.kv.prefix_cache import NoPrefixCache
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.errors import CannotRun
from ridgeline.measure.metrics.latency import tpot_s
from ridgeline.measure.workload import LoadRequest
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import cost_model
from ridgeline.modelspec.rewrite import apply_quantization
from ridgeline.optimize.environment import Load
from ridgeline.records import StepStat
from ridgeline.roofline import Peaks
from ridgeline.workflows.configuration_costs import StepBounds
from ridgeline.workflows.optimize.simulator import ASSUMED_SHARE_PER_RUN, SimulatedEngine

SPEC = load_spec("demo")
PEAKS = Peaks(bytes_s=20e9, flops_s=100e9)
LOAD = Load(rate=0.5, seed=1, window_s=60.0, grace_s=60.0)
STEP_S, RUN_S = 0.0005, 0.0004


def bounds_of(settings: Settings) -> StepBounds:
    spec = SPEC if settings.quantization is None else apply_quantization(SPEC, "int8")
    return StepBounds(model=cost_model(spec), peaks=PEAKS)


def scheduler_of(settings: Settings) -> Scheduler:
    slots = settings.max_num_seqs or 8
    limits = SchedulerLimits(
        max_num_seqs=slots, max_num_batched_tokens=512, max_model_len=2048, chunked_prefill=True
    )
    pool = BlockPool(2_000, 16)
    return Scheduler(limits, make_policy("continuous"), pool, NoPrefixCache())


def requests(count: int, seed: int) -> Sequence[LoadRequest]:
    rng = random.Random(seed)
    return [
        LoadRequest(id=f"r{i}", kind="chat", prompt=(rng.randrange(1000),) * 64, max_tokens=16)
        for i in range(count)
    ]


def engine() -> SimulatedEngine:
    return SimulatedEngine(bounds_of, scheduler_of, requests)


PLAIN = Settings(model="demo")


def truth_s(shapes: Sequence[tuple[int, int]], settings: Settings = PLAIN) -> float:
    """Twice the roof, and overhead per step and per run."""
    return 2.0 * bounds_of(settings).bound_s(shapes, len(shapes)) + STEP_S + RUN_S * len(shapes)


def steps(batches: Sequence[int], seed: int = 0) -> list[StepStat]:
    rng = random.Random(seed)
    found = []
    for index, batch in enumerate(batches):
        shapes = tuple((rng.choice((1, 1, 1, 48)), rng.randrange(400)) for _ in range(batch))
        found.append(
            StepStat(
                index=index, at_s=0.0, plan_s=0.0, run_s=truth_s(shapes), shapes=shapes,
                num_sampled=batch, num_running=batch, num_waiting=0, used_blocks=0,
                num_blocks=2_000, max_num_seqs=8,
            )
        )  # fmt: skip
    return found


def median_tpot_s(oracle: SimulatedEngine, settings: Settings, load: Load = LOAD) -> float:
    found = [tpot_s(request) for request in oracle.run(settings, load).requests]
    return statistics.median(value for value in found if value is not None)


def test_no_prediction_before_the_first_measurement() -> None:
    oracle = engine()
    oracle.learn(Settings(model="demo"), steps([1, 1, 1]))
    with pytest.raises(CannotRun, match="too few steps"):
        oracle.run(Settings(model="demo"), LOAD)


def test_predictions_reproduce_the_measured_steps() -> None:
    oracle = engine()
    oracle.learn(Settings(model="demo"), steps([1 + i % 8 for i in range(200)]))
    alone = Settings(model="demo", max_num_seqs=1)
    assert median_tpot_s(oracle, alone) == pytest.approx(truth_s([(1, 72)]), rel=0.03)
    crowd = Load(rate=40.0, seed=1, window_s=10.0, grace_s=60.0)
    full = statistics.median(
        step.run_s
        for step in oracle.run(Settings(model="demo"), crowd).steps
        if len(step.shapes) == 8
    )
    assert full == pytest.approx(truth_s([(1, 72)] * 8), rel=0.1)


def test_smaller_weights_lower_the_bound_but_not_the_overhead() -> None:
    oracle = engine()
    oracle.learn(Settings(model="demo"), steps([1 + i % 8 for i in range(200)]))
    small = Settings(model="demo", max_num_seqs=1, quantization="int8")
    assert median_tpot_s(oracle, small) == pytest.approx(truth_s([(1, 72)], small), rel=0.03)


@pytest.mark.slow
def test_batching_is_assumed_cheap_until_a_batch_is_measured() -> None:
    """One request at a time says nothing about a second; a guess must not forbid the trial."""
    oracle = engine()
    oracle.learn(Settings(model="demo"), steps([1] * 60))
    crowd = Load(rate=40.0, seed=1, window_s=10.0, grace_s=60.0)

    def full_step_s() -> float:
        done = oracle.run(Settings(model="demo"), crowd)
        return statistics.median(step.run_s for step in done.steps if len(step.shapes) == 8)

    lone_s = truth_s([(1, 72)])
    guessed_s = full_step_s()
    assert guessed_s < lone_s * (1 + 4 * ASSUMED_SHARE_PER_RUN * 7)
    oracle.learn(Settings(model="demo"), steps([8] * 200, seed=2))
    assert abs(full_step_s() - truth_s([(1, 72)] * 8)) < abs(guessed_s - truth_s([(1, 72)] * 8))


def test_predicted_prefix_hits_follow_the_repeated_prompts() -> None:
    """The workload above says one token over and over; another says none twice."""
    lookup = Settings(model="demo", max_num_seqs=1, speculative_config=Speculative(method="ngram"))

    def varied(count: int, seed: int) -> Sequence[LoadRequest]:
        made = requests(count, seed)
        return [msgspec.structs.replace(each, prompt=tuple(range(64))) for each in made]

    gains = []
    for asked in (requests, varied):
        oracle = SimulatedEngine(bounds_of, scheduler_of, asked)
        oracle.learn(Settings(model="demo"), steps([1 + i % 8 for i in range(200)]))
        plain_s = median_tpot_s(oracle, Settings(model="demo", max_num_seqs=1))
        gains.append(plain_s / median_tpot_s(oracle, lookup))
    assert gains[0] > 1.5 and gains[1] == pytest.approx(1.0)
