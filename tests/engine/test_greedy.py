"""A greedy step without torch gives the usual way's tokens and cache, and takes only its own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from ridgeline.engine.assemble import Parts, assemble
from ridgeline.engine.core.plan import Run, SampleAt, StepPlan
from ridgeline.engine.greedy import NativeGreedy, NoGreedy
from ridgeline.engine.resolve import resolve
from ridgeline.records import Sampling
from ridgeline.settings import settings_from

AT = SampleAt(Sampling(temperature=0.0), 0, 0, 1, is_argmax=True)


def opened(**asked: Any) -> Parts:
    return assemble(resolve(settings_from({"kv_cache_memory_bytes": 16 << 20} | asked)))


@pytest.fixture(scope="module")
def parts() -> Parts:
    return opened(num_threads=2, quantization="int4")


def decoding(rng: random.Random, seqs: int, starts: tuple[int, int]) -> tuple[Run, ...]:
    """Runs of one token over prompts of random tokens, blocks apart."""
    runs = []
    for i in range(seqs):
        start = rng.randint(*starts)
        blocks = tuple(range(i * 4, i * 4 + start // 16 + 1))
        runs.append(Run(i, start, (rng.randrange(3, 2000),), blocks, AT))
    return tuple(runs)


def test_the_short_way_is_the_usual_way(parts: Parts) -> None:
    runner, rng = parts.runner, random.Random(3)
    assert isinstance(runner.greedy, NativeGreedy)
    for seqs in (1, 7, 2, 20):
        runs = decoding(rng, seqs, (0, 50))
        for run in runs:
            prompt = tuple(rng.randrange(3, 2000) for _ in range(run.start))
            if prompt:
                runner.run(StepPlan(0, (Run(run.seq_id, 0, prompt, run.blocks, None),)))
        plan = StepPlan(0, runs)
        assert runner.greedy.takes(runs)
        before = [layer.clone() for layer in runner.cache.layers]
        usual = runner._run(plan)
        after = [layer.clone() for layer in runner.cache.layers]
        for layer, old in zip(runner.cache.layers, before, strict=True):
            layer.copy_(old)
        assert runner.run(plan) == usual
        assert all(map(torch.equal, after, runner.cache.layers))


@pytest.mark.parametrize(
    "change",
    [
        {"sample": None},
        {"sample": SampleAt(Sampling(temperature=0.7), 1, 0, 1)},
        {"prompt_logprobs": 0},
        {"tokens": (5, 6)},
        {"tokens": (5, 6), "num_drafts": 1},
    ],
)
def test_one_run_that_asks_for_more_takes_the_usual_way(
    parts: Parts, change: dict[str, Any]
) -> None:
    runs = decoding(random.Random(1), 3, (0, 9))
    assert parts.runner.greedy.takes(runs)
    assert not parts.runner.greedy.takes((*runs, replace(runs[0], **change)))


@pytest.mark.parametrize("asked", [{"layer_backend": "torch"}, {"attention_backend": "torch"}])
def test_where_a_part_is_not_native_there_is_no_short_way(asked: dict[str, Any]) -> None:
    assert isinstance(opened(**asked).runner.greedy, NoGreedy)


def test_a_nan_leaves_no_choice(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = parts.runner.greedy
    assert isinstance(greedy, NativeGreedy)
    logits = torch.full((3, 8), float("nan"))
    monkeypatch.setattr(greedy.likeliest, "_width", 8)
    monkeypatch.setattr(greedy.likeliest, "_room", lambda _: logits)
    monkeypatch.setattr(greedy.likeliest, "head", Blank())
    with pytest.raises(ArithmeticError, match="row 0"):
        parts.runner.run(StepPlan(0, decoding(random.Random(2), 3, (0, 5))))


class Blank:
    """A head that writes nothing."""

    def between(self, *_: Any) -> None:
        pass
