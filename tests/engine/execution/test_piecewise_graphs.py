"""Steps with prompts from graphs between their attention calls, on recordings in place of CUDA."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from ridgeline.engine.attention import build_attention
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.tables import TableAttention
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.execution.graphs.pieces import (
    PiecewiseGraphs,
    table_groups,
    token_sizes,
)
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.scheduler import (
    BlockPool,
    PrefixCache,
    Scheduler,
    SchedulerLimits,
    make_policy,
)
from ridgeline.engine.scheduler.plan import Run, SamplePoint, StepPlan
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost.kv_layout import kv_layout
from ridgeline.modelspec.model import ModelSpec
from ridgeline.records import Request, Sampling, Token
from tests.conformance.tiny_models import VOCAB, make_model
from tests.engine.execution.recorded_graphs import Forbidden, FreedMemory, RecordedPieces

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 4, 40, 64
GREEDY = Sampling(temperature=0.0, max_tokens=None)
DRAWN = Sampling(temperature=0.9, top_p=0.8, max_tokens=None)
FAMILIES = ("llama", "gemma3", "qwen3", "mixtral", "gpt-oss", "gemma3n", "deepseek-v2-greedy")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: Any, tmp_path_factory: Any) -> tuple[ModelSpec, Decoder]:
    path: Path = tmp_path_factory.mktemp(request.param)
    make_model(request.param, path)
    spec = load_spec(str(path))
    decoder = load_decoder(
        str(path), spec, device="cpu", compute_dtype=torch.float32, layer_backend="torch"
    )
    return spec, decoder


def make_runner(model: tuple[ModelSpec, Decoder], pieces: RecordedPieces | None) -> TorchRunner:
    spec, decoder = model
    cache = KvCache.allocate(spec, NUM_BLOCKS + 1, BLOCK_SIZE, torch.float32, "cpu")
    attention = build_attention("tables", spec, cache)
    assert isinstance(attention, TableAttention)
    runner = TorchRunner(decoder, cache, attention)
    if pieces is not None:
        runner.use_pieces(PiecewiseGraphs(decoder, attention, MAX_LEN, pieces, 48))
    return runner


class Traffic:
    """Sequences whose prompts come in chunks, with decoding rows and drafts, by a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        free = self.rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self.blocks = [tuple(free[8 * i : 8 * i + 8]) for i in range(5)]
        self.texts = [[self.rng.randrange(VOCAB) for _ in range(30)] for _ in range(5)]
        self.done = [0] * 5

    def step(self) -> tuple[Run, ...]:
        runs = []
        for i in self.rng.sample(range(5), self.rng.randint(1, 5)):
            start = self.done[i]
            count = min(self.rng.choice((1, 1, 3, 9)), 30 - start)
            if count == 0:
                continue
            self.done[i] += count
            sampling = self.rng.choice((GREEDY, DRAWN))
            point = SamplePoint(sampling, 7 + i, start, 1, is_argmax=sampling.greedy)
            drafts = count - 1 if start and self.rng.random() < 0.3 else 0
            sample = None if self.rng.random() < 0.3 and not drafts else point
            used = self.blocks[i][: (start + count - 1) // BLOCK_SIZE + 1]
            tokens = tuple(self.texts[i][start : start + count])
            runs.append(Run(i, start, tokens, used, sample, num_drafts=drafts))
        return tuple(runs)


def test_mixed_steps_give_the_tokens_and_the_cache_of_eager_ones(
    model: tuple[ModelSpec, Decoder],
) -> None:
    pieces = RecordedPieces()
    eager, replayed = make_runner(model, None), make_runner(model, pieces)
    traffic = Traffic(3)
    for index in range(14):
        plan = StepPlan(index, traffic.step())
        if plan.runs:
            assert replayed.run(plan) == eager.run(plan), index
    for layer, other in zip(eager.cache.layers, replayed.cache.layers, strict=True):
        assert torch.allclose(layer[:NUM_BLOCKS], other[:NUM_BLOCKS], atol=1e-5)
    counts = replayed.graph_counters()
    assert pieces.sessions == counts["num_piecewise_graphs"] / num_graphs(model[0])
    assert counts["num_piecewise_replays"] >= 10


def num_graphs(spec: ModelSpec) -> int:
    """One more than what runs eagerly: attention, and experts whose rows are counted."""
    return 1 + sum(1 + (layer.mlp.router is not None) for layer in spec.layers)


def serve(model: tuple[ModelSpec, Decoder], pieces: RecordedPieces | None) -> dict[str, list[int]]:
    """Greedy tokens of six requests over a cache whose windowed layers give blocks back."""
    spec, decoder = model
    layout = kv_layout(spec)
    cache = KvCache.allocate(spec, 81, BLOCK_SIZE, torch.float32, "cpu", layout=layout)
    attention = build_attention("tables", spec, cache)
    pool = BlockPool(80, BLOCK_SIZE)
    limits = SchedulerLimits(
        max_num_seqs=4, max_num_batched_tokens=24, max_model_len=MAX_LEN, kv_layout=layout
    )
    cached = PrefixCache(pool, None, layout)
    policy = make_policy("continuous")
    scheduler = Scheduler(limits, policy, pool, cached, eos_token_ids=(), seed=0)
    runner = TorchRunner(decoder, cache, attention)
    if pieces is not None:
        assert len(table_groups(attention)) == layout.num_groups
        runner.use_pieces(PiecewiseGraphs(decoder, attention, MAX_LEN, pieces, 24))
    rng, found = random.Random(5), {}
    for index in range(6):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 40)))
        sampling = Sampling(temperature=0.0, max_tokens=rng.randint(3, 20))
        scheduler.add(Request(id=str(index), prompt=prompt, sampling=sampling, arrival_s=0.0))
        found[str(index)] = []
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        for event in scheduler.commit(plan, runner.run(plan), 0.0):
            if isinstance(event, Token):
                found[event.request_id].append(event.token)
    return found


def test_groups_of_layers_with_separate_tables(model: tuple[ModelSpec, Decoder]) -> None:
    pieces = RecordedPieces()
    assert serve(model, pieces) == serve(model, None)
    assert pieces.sessions >= 2


def test_integers_of_a_step_reach_the_device_in_one_copy(
    model: tuple[ModelSpec, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ridgeline.engine.attention.tables import PackedInts

    runner = make_runner(model, RecordedPieces())
    assert runner.pieces is not None
    copies: list[object] = []
    copy_to = PackedInts.copy_to
    monkeypatch.setattr(
        PackedInts, "copy_to", lambda self, device: (copies.append(0), copy_to(self, device))[1]
    )
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("another copy"))
    point = SamplePoint(GREEDY, 0, 3, 1, is_argmax=True)
    runs = (Run(0, 0, (5, 6, 7), (1,), point), Run(1, 0, (9,), (2,), point))
    gathers = any(layer.attention.window or layer.attention.sinks for layer in model[0].layers)
    if not gathers:  # the reference of windows and sinks gathers, and builds its indices
        runner.pieces(runs)
        assert len(copies) == 1
    runner.pieces(tuple(replace(run, start=3, tokens=(1,)) for run in runs))
    assert len(copies) == 2 - gathers


def test_sizes_end_with_the_largest_step() -> None:
    assert token_sizes(20) == (8, 16, 20)
    assert token_sizes(8) == (8,)


def test_recordings_refuse_waiting_and_freed_memory() -> None:
    pieces = RecordedPieces()
    pieces.begin()
    with pytest.raises(Forbidden, match="_local_scalar_dense"):
        torch.ones(2).sum().item()
    with pytest.raises(Forbidden, match="lift_fresh"):
        torch.tensor([1, 2])
    pieces.end()
    rows, kept = torch.ones(3), torch.zeros(3)
    pieces.begin()
    kept.add_(rows)
    replay = pieces.end()
    replay()
    assert kept.tolist() == [2.0] * 3
    del rows
    with pytest.raises(FreedMemory):
        replay()
