"""On a GPU, every backend chooses the tokens of the CPU's reference, from graphs and without."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.engine.attention import attention_backend_of, build_attention
from ridgeline.engine.attention.base import AttentionSite
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.tables import TableAttention
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.execution.graphs.decode import CudaCapture, DecodeGraphs, why_no_graphs
from ridgeline.engine.execution.graphs.pieces import CudaPieces, PiecewiseGraphs
from ridgeline.engine.execution.layers import layer_backend_of
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.scheduler.plan import StepPlan
from ridgeline.modelspec.checkpoints.load import load_spec
from tests.conformance.tiny_models import make_model
from tests.engine.execution.test_decode_graphs import BLOCK_SIZE, DRAWN, NUM_BLOCKS, Sequences
from tests.engine.execution.test_piecewise_graphs import Traffic

FAMILIES = ("llama", "qwen3", "mistral", "gemma3", "qwen3-moe")
LENGTHS = [3, 17, 8, 1, 12]
DTYPE = torch.float32


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: Any, tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    make_model(request.param, path)
    return path


def make_runner(
    directory: Path, device: str, layers: str, attention: str, *, graphs: bool = False
) -> TorchRunner:
    spec = load_spec(str(directory))
    why_not = layer_backend_of(layers).why_not(spec, torch.device(device), DTYPE)
    if why_not:
        pytest.skip("; ".join(why_not))
    site = AttentionSite.of(spec, torch.device(device), DTYPE, BLOCK_SIZE)
    if why_not := attention_backend_of(attention).why_not(site):
        pytest.skip("; ".join(why_not))
    decoder = load_decoder(
        str(directory), spec, device=device, compute_dtype=DTYPE, layer_backend=layers
    )
    cache = KvCache.allocate(spec, NUM_BLOCKS + 1, BLOCK_SIZE, DTYPE, device)
    built = build_attention(attention, spec, cache)
    runner = TorchRunner(decoder, cache, built)
    if graphs:
        if why := why_no_graphs(decoder, built):
            pytest.skip(why)
        assert isinstance(built, TableAttention)
        runner.use_graphs(DecodeGraphs(decoder, built, 64, CudaCapture()))
    return runner


def check_equal(ours: Sequences, reference: Sequences, steps: int = 10) -> None:
    rng = random.Random(5)
    for _ in range(steps):
        members = rng.sample(range(len(LENGTHS)), rng.randint(1, len(LENGTHS)))
        assert ours.step(members) == reference.step(members)


@pytest.mark.parametrize("layers", ["torch", "triton"])
@pytest.mark.parametrize("attention", ["torch", "tables", "triton"])
def test_eager_steps_choose_the_tokens_of_the_cpu(
    directory: Path, layers: str, attention: str
) -> None:
    ours = Sequences(make_runner(directory, "cuda", layers, attention), LENGTHS)
    reference = Sequences(make_runner(directory, "cpu", "torch", "torch"), LENGTHS)
    assert ours.tokens == reference.tokens
    check_equal(ours, reference)


@pytest.mark.parametrize("layers", ["torch", "triton"])
@pytest.mark.parametrize("attention", ["tables", "triton"])
def test_graphs_choose_the_tokens_of_the_cpu(directory: Path, layers: str, attention: str) -> None:
    ours = Sequences(make_runner(directory, "cuda", layers, attention, graphs=True), LENGTHS)
    reference = Sequences(make_runner(directory, "cpu", "torch", "torch"), LENGTHS)
    check_equal(ours, reference)
    graphs = ours.runner.graphs
    assert graphs is not None and graphs.counts.num_replays == 10


@pytest.mark.parametrize("attention", ["tables", "triton"])
def test_graphs_verify_drafts(directory: Path, attention: str) -> None:
    ours = Sequences(make_runner(directory, "cuda", "torch", attention, graphs=True), [9, 5, 14])
    reference = Sequences(make_runner(directory, "cpu", "torch", "torch"), [9, 5, 14])
    for _ in range(4):
        drafts = [tuple(tokens[2 : 2 + i]) for i, tokens in enumerate(reference.tokens)]
        theirs = reference.step(range(3), drafts=drafts.__getitem__)
        assert ours.step(range(3), drafts=drafts.__getitem__) == theirs


def test_graphs_draw_what_the_eager_path_draws(directory: Path) -> None:
    runners = [make_runner(directory, "cuda", "torch", "tables", graphs=g) for g in (True, False)]
    graphs, eager = (Sequences(runner, [9, 5, 14]) for runner in runners)
    for _ in range(6):
        assert graphs.step(range(3), sampling=DRAWN) == eager.step(range(3), sampling=DRAWN)


@pytest.mark.parametrize("layers", ["torch", "triton"])
@pytest.mark.parametrize("attention", ["tables", "triton"])
def test_steps_with_prompts_from_graphs_choose_the_tokens_of_the_cpu(
    directory: Path, layers: str, attention: str
) -> None:
    ours = make_runner(directory, "cuda", layers, attention)
    assert isinstance(ours.attention, TableAttention)
    ours.use_pieces(PiecewiseGraphs(ours.decoder, ours.attention, 64, CudaPieces(), 48))
    reference = make_runner(directory, "cpu", "torch", "torch")
    traffic = Traffic(3)
    for index in range(14):
        plan = StepPlan(index, traffic.step())
        if plan.runs:
            assert ours.run(plan) == reference.run(plan), index
    assert ours.graph_counters()["num_piecewise_replays"] >= 10
