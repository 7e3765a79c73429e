"""The runner's timing on a scripted clock, and its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ridgeline.engine.scheduler.plan import Run, SamplePoint, StepPlan
from ridgeline.engine.structured_output.none import NoGrammars
from ridgeline.engine.tokenization import NoTokenizer
from ridgeline.records import Sampling
from ridgeline.twin.masked_choice import MaskedChoice
from ridgeline.twin.runner import MAX_CATCH_UP_S, ModelledRunner
from ridgeline.twin.synthetic_model import SyntheticModel

STEP_S = 0.02


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def read(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class ConstantSteps:
    def step_s(self, shapes: Sequence[tuple[int, int]], num_sampled: int) -> float:
        return STEP_S


def make_runner(clock: Clock, *, speed: float = 1.0, noise: float = 0.0) -> ModelledRunner:
    return ModelledRunner(
        ConstantSteps(),  # type: ignore[arg-type]  # the part that is used
        SyntheticModel(range(3, 1000), (0,), noise_nats=noise),
        MaskedChoice(NoGrammars("none"), NoTokenizer("none", "a test"), 1000, (0,)),
        speed=speed,
        clock=clock.read,
        sleep=clock.sleep,
    )


def run_of(
    seq_id: int, sampling: Sampling, *, token: int = 7, start: int = 4, index: int = 0
) -> Run:
    point = SamplePoint(sampling=sampling, seed=seq_id, index=index, num_prompt=4)
    return Run(seq_id=seq_id, start=start, tokens=(token,), blocks=(0,), sample=point)


GREEDY = Sampling(temperature=0.0, max_tokens=8)


def step(runner: ModelledRunner, *ids: int) -> None:
    runner.run(StepPlan(0, tuple(run_of(i, GREEDY) for i in ids)))


def test_steps_of_one_batch_follow_each_other_without_gaps() -> None:
    clock = Clock()
    runner = make_runner(clock)
    for _ in range(50):
        step(runner, 1)
        clock.now_s += 0.003  # the host between two steps
    assert clock.now_s - 0.003 == pytest.approx(100.0 + 50 * STEP_S)
    assert runner.late_s == 0


def test_step_after_an_idle_time_begins_now() -> None:
    clock = Clock()
    runner = make_runner(clock)
    step(runner, 1)
    clock.now_s += 5.0
    step(runner, 2)
    assert clock.now_s == pytest.approx(105.0 + 2 * STEP_S)


def test_speed_divides_the_time_of_steps() -> None:
    clock = Clock()
    runner = make_runner(clock, speed=10.0)
    step(runner, 1)
    assert clock.now_s == pytest.approx(100.0 + STEP_S / 10)


def test_long_stall_is_counted_and_not_caught_up() -> None:
    clock = Clock()
    runner = make_runner(clock)
    step(runner, 1)
    clock.now_s += 1.0
    step(runner, 1)
    assert runner.late_s == pytest.approx(1.0 - MAX_CATCH_UP_S)


def test_greedy_tokens_depend_on_the_context_alone() -> None:
    first, second = make_runner(Clock()), make_runner(Clock())
    runs = [
        run_of(i, GREEDY, token=t, start=p) for i, (t, p) in enumerate([(5, 9), (6, 9), (5, 8)])
    ]
    together = first.run(StepPlan(0, tuple(runs))).outputs
    alone = [second.run(StepPlan(0, (run,))).outputs[0] for run in runs]
    assert list(together) == alone
    assert len({output.tokens for output in alone}) > 1


def test_logprobs_of_the_greedy_token_are_the_largest() -> None:
    runner = make_runner(Clock(), noise=0.2)
    sampling = Sampling(temperature=0.0, max_tokens=8, logprobs=5)
    for position in range(40):
        output = runner.run(StepPlan(0, (run_of(1, sampling, start=position),))).outputs[0]
        (row,) = output.logprobs
        assert row.rank == 1
        assert row.top[0] == (output.tokens[0], row.logprob)
        assert [value for _, value in row.top] == sorted((v for _, v in row.top), reverse=True)


def test_noise_of_a_format_changes_some_greedy_tokens() -> None:
    exact, lossy = make_runner(Clock()), make_runner(Clock(), noise=0.3)
    plans = [StepPlan(0, (run_of(1, GREEDY, start=position),)) for position in range(300)]
    pairs = [
        (exact.run(plan).outputs[0].tokens, lossy.run(plan).outputs[0].tokens) for plan in plans
    ]
    changed = sum(a != b for a, b in pairs)
    assert 10 < changed < 150


def test_answer_without_a_limit_ends() -> None:
    runner = make_runner(Clock())
    sampling = Sampling(max_tokens=None)
    ended = [
        next(
            (
                i
                for i in range(5000)
                if runner.run(_plan(sampling, seed, i)).outputs[0].tokens == (0,)
            ),
            None,
        )
        for seed in range(5)
    ]
    assert all(length is not None for length in ended)
    assert len(set(ended)) > 1


def _plan(sampling: Sampling, seed: int, index: int) -> StepPlan:
    return StepPlan(0, (run_of(seed, sampling, index=index),))
