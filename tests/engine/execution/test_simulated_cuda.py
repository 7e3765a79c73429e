"""The capture, the queue and the waiting of CUDA on a simulated card: what no GPU is needed for."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.engine.attention import build_attention
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.tables import TableAttention
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.execution.graphs.ahead import CudaQueue, StepsAhead
from ridgeline.engine.execution.graphs.decode import CudaCapture, DecodeGraphs, StepOutputs
from ridgeline.engine.execution.graphs.inputs import StepInputs
from ridgeline.engine.execution.graphs.pieces import CudaPieces, PiecewiseGraphs
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.scheduler.plan import StepPlan
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.model import ModelSpec
from tests.conformance.tiny_models import make_model
from tests.engine.execution.recorded_graphs import Forbidden, StepWatch
from tests.engine.execution.simulated_cuda import Card, CudaError
from tests.engine.execution.test_decode_graphs import (
    BLOCK_SIZE,
    GREEDY,
    NUM_BLOCKS,
    Sequences,
)
from tests.engine.execution.test_piecewise_graphs import Traffic

pytestmark = pytest.mark.slow
LENGTHS = [3, 17, 8, 1, 12]


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> tuple[ModelSpec, Decoder]:
    path: Path = tmp_path_factory.mktemp("llama")
    make_model("llama", path)
    spec = load_spec(str(path))
    return spec, load_decoder(
        str(path), spec, device="cpu", compute_dtype=torch.float32, layer_backend="torch"
    )


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    card.install(monkeypatch)
    return card


def make_runner(
    model: tuple[ModelSpec, Decoder], graphs: str = "", ahead: bool = False
) -> TorchRunner:
    """A runner whose steps come from graphs of the card: of decode steps or of pieces."""
    spec, decoder = model
    cache = KvCache.allocate(spec, NUM_BLOCKS + 1, BLOCK_SIZE, torch.float32, "cpu")
    attention = build_attention("tables", spec, cache)
    assert isinstance(attention, TableAttention)
    runner = TorchRunner(decoder, cache, attention)
    if graphs == "decode":
        captured = DecodeGraphs(decoder, attention, 64, CudaCapture())
        runner.use_graphs(captured)
        if ahead:
            runner.use_steps_ahead(StepsAhead(captured, CudaQueue(), BLOCK_SIZE))
    elif graphs == "pieces":
        runner.use_pieces(PiecewiseGraphs(decoder, attention, 64, CudaPieces(), 48))
    return runner


@pytest.mark.parametrize("ahead", [False, True])
def test_decode_steps_from_cuda_graphs(
    model: tuple[ModelSpec, Decoder], card: Card, ahead: bool
) -> None:
    """Tokens equal those without graphs; a bucket is captured when a step first needs it."""
    ours = Sequences(make_runner(model, "decode", ahead), LENGTHS)
    plain = Sequences(make_runner(model), LENGTHS)
    rng, graphs = random.Random(3), ours.runner.graphs
    assert graphs is not None and card.log.count("capture") == 0
    buckets = set()
    for _ in range(12):
        members = rng.sample(range(5), rng.randint(1, 5))
        assert ours.step(members) == plain.step(members)
        buckets.add(graphs.bucket_of([ours.run(i, False, GREEDY, ()) for i in members]).rows)
        assert card.log.count("capture") == len(buckets)
    assert card.log.count("replay") >= 12
    assert card.streams[-1] is card.default


def test_a_step_is_one_copy_one_replay_and_one_wait(
    model: tuple[ModelSpec, Decoder], card: Card
) -> None:
    runner = make_runner(model, "decode")
    sequences = Sequences(runner, LENGTHS)
    sequences.step(range(5))
    del card.log[:]
    with StepWatch() as watch:
        sequences.step(range(5))
    assert card.log == ["replay"]
    assert (watch.copies_of_integers, watch.waits, watch.host_data) == (1, 1, 0), watch.seen


def test_stale_inputs_of_a_replay_are_seen(
    model: tuple[ModelSpec, Decoder], card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test of the tests: without the copy, a graph decodes the step before once more."""
    ours = Sequences(make_runner(model, "decode"), LENGTHS)
    plain = Sequences(make_runner(model), LENGTHS)
    assert ours.step(range(5)) == plain.step(range(5))
    monkeypatch.setattr(StepInputs, "copy", lambda *_: None)
    steps = [(ours.step(range(5)), plain.step(range(5))) for _ in range(3)]
    assert any(own != want for own, want in steps)


def test_mixed_steps_in_pieces(model: tuple[ModelSpec, Decoder], card: Card) -> None:
    ours, plain, traffic = make_runner(model, "pieces"), make_runner(model), Traffic(3)
    for index in range(14):
        plan = StepPlan(index, traffic.step())
        if plan.runs:
            assert ours.run(plan) == plain.run(plan), index
    assert card.log.count("replay") > 14 and card.streams[-1] is card.default


def test_an_error_within_a_piece_leaves_no_capture_open(card: Card) -> None:
    """The error is the one that was met, and the next capture begins as if nothing had been."""
    pieces, row = CudaPieces(), torch.zeros(2)
    with pytest.raises(Forbidden), pieces.session():
        pieces.begin()
        row.sum().item()
    assert card.capture is None and card.streams[-1] is card.default
    assert card.log[-1] == "wait_stream"  # the work of the warm-up comes before what follows
    with pieces.session():
        pieces.begin()
        row.add_(1)
        replay = pieces.end()
    replay()
    assert row.tolist() == [2.0, 2.0]  # recording, on this card, adds once too


def test_an_error_within_a_decode_graph_leaves_its_stream(card: Card) -> None:
    capture, row = CudaCapture(), torch.zeros(2, 3)

    def outputs() -> StepOutputs:
        return StepOutputs(row, row, row.add(1).sum(1).int())

    def waits() -> StepOutputs:
        if card.capture is not None:
            torch.cuda.synchronize()
        return outputs()

    with pytest.raises(CudaError):
        capture(waits)
    assert card.capture is None and card.streams[-1] is card.default
    assert capture(outputs)().tokens_R.tolist() == [3, 3]


def test_the_card_refuses_what_cuda_refuses(card: Card) -> None:
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CudaError, match="default stream"):
        graph.capture_begin()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        with pytest.raises(CudaError, match="under way"):
            torch.cuda.CUDAGraph().capture_begin()
        with pytest.raises(CudaError, match="waited"):
            torch.cuda.current_stream().synchronize()
        with pytest.raises(CudaError, match="invalidated"):
            graph.capture_end()
