"""The greedy fast path yields the tokens and cache of the general path, only on its steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from ridgeline.config.settings import settings_from
from ridgeline.engine.build import EngineParts, assemble
from ridgeline.engine.config import resolve
from ridgeline.engine.execution.greedy_fast_path import NativeGreedyPath, NoGreedyPath
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.sampling.base import Choice
from ridgeline.engine.sampling.verify.verifier import Verifier
from ridgeline.engine.scheduler.plan import Run, SamplePoint, StepPlan
from ridgeline.engine.speculate.drafters.target_model import last_hidden, last_tokens_of
from ridgeline.records import Sampling

AT = SamplePoint(Sampling(temperature=0.0), 0, 0, 1, is_argmax=True)


def opened(**asked: Any) -> EngineParts:
    return assemble(
        resolve(settings_from({"model": "demo", "kv_cache_memory_bytes": 16 << 20} | asked))
    )


@pytest.fixture(scope="module")
def parts() -> EngineParts:
    return opened(num_threads=2, quantization="int4")


def decoding(
    rng: random.Random, seqs: int, starts: tuple[int, int], max_drafts: int = 0
) -> tuple[Run, ...]:
    """Decoding runs with up to `max_drafts` drafts after random prompts, in separate blocks."""
    runs = []
    for i in range(seqs):
        start, num_drafts = rng.randint(*starts), rng.randint(0, max_drafts)
        tokens = tuple(rng.randrange(3, 2000) for _ in range(1 + num_drafts))
        blocks = tuple(range(i * 5, i * 5 + (start + num_drafts) // 16 + 1))
        runs.append(Run(i, start, tokens, blocks, AT, num_drafts=num_drafts))
    return tuple(runs)


def read_prompts(runner: TorchRunner, runs: Sequence[Run], rng: random.Random) -> None:
    for run in runs:
        prompt = tuple(rng.randrange(3, 2000) for _ in range(run.start))
        if prompt:
            runner.run(StepPlan(0, (Run(run.seq_id, 0, prompt, run.blocks, None),)))


def right_at_first(runner: TorchRunner, runs: Sequence[Run], rng: random.Random) -> list[Run]:
    """The same runs with drafts of which the first few are right."""
    found = []
    for run in runs:
        drafts: tuple[int, ...] = ()
        for _ in range(rng.randint(0, run.num_drafts)):
            fed = replace(run, tokens=(run.tokens[0], *drafts), num_drafts=0, sample=None)
            drafts += tuple(last_tokens_of(runner.decoder, runner.attention)([fed]))
        found.append(replace(run, tokens=(run.tokens[0], *drafts, *run.drafts[len(drafts) :])))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("max_drafts", [0, 6])
def test_fast_path_equals_the_general_path(parts: EngineParts, max_drafts: int) -> None:
    """Tokens and cache bit for bit, with one row per run and with varying numbers of rows."""
    runner, rng = parts.runner, random.Random(3)
    assert isinstance(runner.greedy, NativeGreedyPath)
    for seqs in (1, 7, 2, 20):
        runs = decoding(rng, seqs, (0, 50), max_drafts)
        read_prompts(runner, runs, rng)
        runs = tuple(right_at_first(runner, runs, rng))
        plan = StepPlan(0, runs)
        assert runner.greedy.can_run(runs)
        before = [layer.clone() for layer in runner.cache.layers]
        usual = runner._run_general(plan)
        after = [layer.clone() for layer in runner.cache.layers]
        for layer, old in zip(runner.cache.layers, before, strict=True):
            layer.copy_(old)
        assert runner.run(plan) == usual
        assert all(map(torch.equal, after, runner.cache.layers))
    most = max(len(output.tokens) for output in usual.outputs)
    assert (most > 2) == bool(max_drafts), "drafts are accepted"


@pytest.mark.slow
def test_fast_path_samples_the_last_row_of_every_run(parts: EngineParts) -> None:
    """As a model-based drafter uses it: runs of one row and of many, prompts included."""
    runner, rng = parts.runner, random.Random(8)
    decoder, attention = parts.runner.decoder, parts.runner.attention
    short = last_tokens_of(decoder, attention)
    for max_drafts in (0, 5, 30):
        runs = [
            replace(run, sample=None, num_drafts=0) for run in decoding(rng, 6, (0, 20), max_drafts)
        ]
        read_prompts(runner, runs, rng)
        with torch.inference_mode():
            x_SC = last_hidden(decoder, attention, runs)
            expected = decoder.logits(x_SC).argmax(1).tolist()
        assert short(runs) == expected
        assert last_tokens_of(decoder, attention, 9)(runs) != expected


def test_observers_see_the_same_as_on_the_general_path(parts: EngineParts) -> None:
    """States, accepted and rejected tokens; exposed arrays stay valid after the next step."""
    runner, rng = parts.runner, random.Random(5)
    runs = decoding(rng, 5, (0, 30), 4)
    read_prompts(runner, runs, rng)
    watchers = [RecordingObserver(), RecordingObserver()]
    for watcher, way in zip(watchers, (TorchRunner._run_general, TorchRunner.run), strict=True):
        verifier = Verifier(row_observer=watcher.row_observer)
        own = TorchRunner(
            runner.decoder, runner.cache, runner.attention, verifier=verifier, observer=watcher
        )
        assert own.greedy.can_run(runs)
        for some in (runs, runs[:2]):
            way(own, StepPlan(0, some))
    usual, short = watchers
    assert usual.said == short.said and usual.given == short.given
    assert all(map(torch.equal, usual.states, short.states))


@pytest.mark.parametrize(
    "change",
    [
        {"sample": None},
        {"sample": SamplePoint(Sampling(temperature=0.7), 1, 0, 1)},
        {"prompt_logprobs": 0},
        {"tokens": (5, 6)},
        {"tokens": (4, 5, 6), "num_drafts": 1},
    ],
)
def test_one_run_with_other_needs_takes_the_general_path(
    parts: EngineParts, change: dict[str, Any]
) -> None:
    runs = decoding(random.Random(1), 3, (0, 9))
    assert parts.runner.greedy.can_run(runs)
    assert not parts.runner.greedy.can_run((*runs, replace(runs[0], **change)))


@pytest.mark.parametrize("asked", [{"layer_backend": "torch"}, {"attention_backend": "torch"}])
def test_fast_path_needs_every_part_to_be_native(asked: dict[str, Any]) -> None:
    assert isinstance(opened(**asked).runner.greedy, NoGreedyPath)


def test_nan_logits_raise(parts: EngineParts, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = parts.runner.greedy
    assert isinstance(greedy, NativeGreedyPath)
    logits = torch.full((3, 8), float("nan"))
    monkeypatch.setattr(greedy.argmax_head, "_width", 8)
    monkeypatch.setattr(greedy.argmax_head, "_num_tokens", 8)
    monkeypatch.setattr(greedy.argmax_head, "_buffer", lambda _: logits)
    monkeypatch.setattr(greedy.argmax_head, "head", NoOpHead())
    with pytest.raises(ArithmeticError, match="row 0"):
        parts.runner.run(StepPlan(0, decoding(random.Random(2), 3, (0, 5))))


class RecordingObserver:
    """Records what it is shown."""

    def __init__(self) -> None:
        self.states: list[torch.Tensor] = []
        self.given: list[list[int]] = []
        self.said: list[tuple[int, list[Choice]]] = []

    def observe(self, runs: Sequence[Run], num_outputs: Sequence[int], x_TC: torch.Tensor) -> None:
        self.states.append(x_TC)
        self.given.append(list(num_outputs))

    def row_observer(self, run: Run, chosen: Sequence[Choice]) -> None:
        self.said.append((run.seq_id, list(chosen)))


class NoOpHead:
    """A head that writes nothing."""

    def multiply_rows(self, *_: Any) -> None:
        pass
