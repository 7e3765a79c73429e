"""Decode steps from buckets: padding, block tables and drafts, on recordings in place of CUDA."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from ridgeline.engine.attention import build_attention
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.kv_format import kv_format
from ridgeline.engine.attention.states import StatefulAttention
from ridgeline.engine.attention.tables import TableAttention
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.execution.graphs.buckets import Bucket
from ridgeline.engine.execution.graphs.decode import (
    NO_TOKEN,
    DecodeGraphs,
    StepOutputs,
    first_largest,
    make_decode_graphs,
    why_no_graphs,
)
from ridgeline.engine.execution.graphs.warm_up import warm_up
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.sampling import load_sampler
from ridgeline.engine.sampling.verify import verifier
from ridgeline.engine.scheduler.plan import NoTokenError, Run, SamplePoint, StepPlan
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.model import ModelSpec
from ridgeline.records import Sampling
from tests.conformance.tiny_models import VOCAB, make_model
from tests.engine.execution.recorded_graphs import RecordedCapture, StepWatch

BLOCK_SIZE, NUM_BLOCKS = 4, 40
GREEDY = Sampling(temperature=0.0, max_tokens=None)
DRAWN = Sampling(temperature=0.9, top_p=0.8, max_tokens=None)


@pytest.fixture(scope="module", params=["llama", "gemma3", "youtu"])
def model(request: Any, tmp_path_factory: Any) -> tuple[ModelSpec, Decoder]:
    path: Path = tmp_path_factory.mktemp(request.param)
    make_model(request.param, path)
    spec = load_spec(str(path))
    decoder = load_decoder(
        str(path), spec, device="cpu", compute_dtype=torch.float32, layer_backend="torch"
    )
    return spec, decoder


class Sequences:
    """Sequences with scattered blocks, prefilled, of which each step decodes some."""

    def __init__(self, runner: TorchRunner, lengths: list[int], seed: int = 0) -> None:
        rng = random.Random(seed)
        free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        per_sequence = NUM_BLOCKS // len(lengths)
        self.runner = runner
        self.blocks = [tuple(free.pop() for _ in range(per_sequence)) for _ in lengths]
        self.tokens = [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]
        self.step(range(len(lengths)), prefill=True)

    def point(self, index: int, sampling: Sampling) -> SamplePoint:
        length = len(self.tokens[index])
        return SamplePoint(sampling, 7 + index, length, 1, is_argmax=sampling.greedy)

    def run(self, index: int, prefill: bool, sampling: Sampling, drafts: tuple[int, ...]) -> Run:
        tokens, blocks = self.tokens[index], self.blocks[index]
        start = 0 if prefill else len(tokens) - 1
        used = blocks[: (len(tokens) + len(drafts) - 1) // BLOCK_SIZE + 1]
        fed = (*tokens[start:], *drafts)
        point, drafted = self.point(index, sampling), len(drafts)
        return Run(index, start, fed, used, point, num_drafts=drafted, state_slot=index)

    def step(
        self,
        members: Any,
        *,
        prefill: bool = False,
        sampling: Sampling = GREEDY,
        drafts: Callable[[int], tuple[int, ...]] = lambda _: (),
    ) -> list[tuple[int, ...]]:
        runs = tuple(self.run(i, prefill, sampling, drafts(i)) for i in members)
        outputs = [output.tokens for output in self.runner.run(StepPlan(0, runs)).outputs]
        for index, tokens in zip(members, outputs, strict=True):
            self.tokens[index].extend(tokens)
        return outputs


def make_runner(model: tuple[ModelSpec, Decoder], *, graphs: bool) -> TorchRunner:
    spec, decoder = model
    format = kv_format(spec.kv_dtype)
    cache = KvCache.allocate(spec, NUM_BLOCKS + 1, BLOCK_SIZE, torch.float32, "cpu", format)
    attention = build_attention("tables" if graphs else "torch", spec, cache)
    runner = TorchRunner(decoder, cache, attention)
    if graphs:
        assert isinstance(attention, TableAttention)
        runner.use_graphs(DecodeGraphs(decoder, attention, 64, RecordedCapture()))
    return runner


def test_padded_steps_choose_the_tokens_of_the_general_path(
    model: tuple[ModelSpec, Decoder],
) -> None:
    lengths = [3, 17, 8, 1, 12]
    plain, padded = (Sequences(make_runner(model, graphs=g), lengths) for g in (False, True))
    rng = random.Random(3)
    for _ in range(12):
        members = rng.sample(range(5), rng.randint(1, 5))
        assert padded.step(members) == plain.step(members)
    graphs = padded.runner.graphs
    assert graphs is not None and graphs.counts.num_replays == 12


def test_drafts_are_verified_in_the_same_step(model: tuple[ModelSpec, Decoder]) -> None:
    plain, padded = (Sequences(make_runner(model, graphs=g), [9, 5, 14]) for g in (False, True))

    def drafts(index: int) -> tuple[int, ...]:
        return ((11, 3), (), (5, 6, 7))[index]

    for _ in range(4):
        assert padded.step(range(3), drafts=drafts) == plain.step(range(3), drafts=drafts)


def test_drawn_tokens_come_from_the_logits_of_the_graph(model: tuple[ModelSpec, Decoder]) -> None:
    plain, padded = (Sequences(make_runner(model, graphs=g), [9, 5, 14]) for g in (False, True))
    for _ in range(6):
        assert padded.step(range(3), sampling=DRAWN) == plain.step(range(3), sampling=DRAWN)
    graphs = padded.runner.graphs
    assert graphs is not None and graphs.counts.num_replays == 6


def test_rows_of_a_sequence_that_left_become_padding(model: tuple[ModelSpec, Decoder]) -> None:
    """A row that a longer batch used last must neither write to its old blocks nor read them."""
    sequences = Sequences(make_runner(model, graphs=True), [9, 5, 14, 6])
    sequences.step(range(4))
    cache = sequences.runner.cache
    before = [layer.clone() for layer in cache.layers]
    sequences.step([0, 1, 2])
    kept = [*sequences.blocks[3]]
    for layer, old in zip(cache.layers, before, strict=True):
        assert torch.equal(layer[kept], old[kept])


def test_drawn_tokens_take_one_more_copy_and_one_wait(
    model: tuple[ModelSpec, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler of a GPU, on the CPU: five numbers a row go there, the tokens come back."""
    monkeypatch.setattr(verifier, "sample", load_sampler("batched"))
    sequences = Sequences(make_runner(model, graphs=True), [9, 5, 14])
    sequences.step(range(3), sampling=DRAWN, drafts=lambda _: (5, 9))
    with StepWatch() as watch:
        sequences.step(range(3), sampling=DRAWN, drafts=lambda _: (5, 9))
    assert (watch.copies_of_integers, watch.waits, watch.host_data) == (1, 1, 1), watch.seen


@pytest.mark.parametrize("drafts", [(), (5, 9)])
def test_step_is_one_copy_to_the_device_one_graph_and_one_wait(
    model: tuple[ModelSpec, Decoder], drafts: tuple[int, ...]
) -> None:
    runner = make_runner(model, graphs=True)
    sequences = Sequences(runner, [9, 5, 14])
    graphs = runner.graphs
    assert graphs is not None
    sequences.step(range(3), drafts=lambda _: drafts)
    before = graphs.counts.num_replays
    with StepWatch() as watch:
        sequences.step(range(3), drafts=lambda _: drafts)
    assert graphs.counts.num_replays == before + 1
    assert (watch.copies_of_integers, watch.waits, watch.host_data) == (1, 1, 0), watch.seen


def test_prompts_and_scored_runs_are_not_decoded(model: tuple[ModelSpec, Decoder]) -> None:
    graphs = make_runner(model, graphs=True).graphs
    assert graphs is not None
    point = SamplePoint(GREEDY, 0, 0, 1, is_argmax=True)
    decode = Run(0, 3, (5,), (1,), point)
    assert graphs.can_run([decode])
    assert not graphs.can_decode([replace(decode, tokens=(5, 6))])
    assert not graphs.can_decode([replace(decode, prompt_logprobs=2)])
    assert not graphs.can_decode([replace(decode, sample=None)])
    assert not graphs.can_decode([decode] * 257)
    assert not graphs.can_decode([])


def test_steps_of_one_bucket_share_a_graph(model: tuple[ModelSpec, Decoder]) -> None:
    sequences = Sequences(make_runner(model, graphs=True), [3, 3, 3, 3, 3])
    for members in ([0], [1, 2], [1, 2, 3], [0, 1, 2, 3], range(5)):
        sequences.step(members)
    graphs = sequences.runner.graphs
    assert graphs is not None
    assert list(graphs.counts.by_bucket) == ["1x16", "2x16", "4x16", "8x16"]
    run = sequences.run(0, False, GREEDY, ())
    assert graphs.bucket_of([run] * 6) == Bucket(8, 16)


def test_nan_logits_name_their_row(model: tuple[ModelSpec, Decoder]) -> None:
    runner = make_runner(model, graphs=True)
    sequences = Sequences(runner, [3, 4])
    graphs = runner.graphs
    assert graphs is not None
    runs = [sequences.run(i, False, GREEDY, ()) for i in range(2)]
    _, replay = graphs._graphs.setdefault(graphs.bucket_of(runs), graphs._make(Bucket(2, 16), runs))
    outputs = replay()
    bad = StepOutputs(outputs.x_RC, outputs.logits_RV, torch.tensor([3, NO_TOKEN]))
    inputs, _ = graphs._graphs[Bucket(2, 16)]
    graphs._graphs[Bucket(2, 16)] = inputs, lambda: bad
    with pytest.raises(NoTokenError, match="row 1"):
        graphs(runs)


def test_first_largest_is_the_lowest_id_of_equal_logits() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0.0, 2.0, 2.0], [nan, 1.0, 0.0], [-inf] * 3, [3.0, 1.0, 2.0]])
    assert first_largest(logits).tolist() == [1, NO_TOKEN, NO_TOKEN, 0]


def test_reasons_against_graphs_are_named(model: tuple[ModelSpec, Decoder]) -> None:
    spec, decoder = model
    cache = KvCache.allocate(spec, 4, BLOCK_SIZE, torch.float32, "cpu")
    attention = build_attention("tables", spec, cache)
    assert why_no_graphs(decoder, attention) == "the device is cpu"
    assert make_decode_graphs(decoder, attention, 16) is None
    runner = make_runner(model, graphs=False)
    assert runner.describe_graphs() == "no CUDA graphs: the device is cpu"
    assert runner.graph_counters() == {}
    runner = make_runner(model, graphs=True)
    Sequences(runner, [3]).step([0])
    assert runner.describe_graphs().startswith("CUDA graphs of up to 256 rows")
    assert runner.graph_counters()["num_graph_replays"] == 1.0


def test_warming_up_writes_to_the_padding_block_alone(model: tuple[ModelSpec, Decoder]) -> None:
    runner = make_runner(model, graphs=True)
    cache, graphs = runner.cache, runner.graphs
    assert graphs is not None
    assert warm_up(runner.decoder, runner.attention, graphs, 16, NUM_BLOCKS) > 0
    assert list(graphs.counts.by_bucket) == ["1x16", "2x16", "16x16"]
    assert all(not layer[:NUM_BLOCKS].any() for layer in cache.layers)
    assert all(layer[NUM_BLOCKS].any() for layer in cache.layers)


def test_states_of_recurrent_layers_are_read_and_written_by_the_graph(tmp_path: Path) -> None:
    make_model("qwen3.5", tmp_path)
    spec = load_spec(str(tmp_path))
    decoder = load_decoder(
        str(tmp_path), spec, device="cpu", compute_dtype=torch.float32, layer_backend="torch"
    )
    found = []
    for graphs in (False, True):
        cache = KvCache.allocate(
            spec, NUM_BLOCKS + 1, BLOCK_SIZE, torch.float32, "cpu", num_states=3
        )
        attention = build_attention("tables" if graphs else "torch", spec, cache)
        assert isinstance(attention, StatefulAttention)
        runner = TorchRunner(decoder, cache, attention)
        if graphs:
            assert isinstance(attention.inner, TableAttention)
            runner.use_graphs(
                DecodeGraphs(
                    decoder, attention.inner, 64, RecordedCapture(), recurrent=attention.states
                )
            )
        sequences = Sequences(runner, [9, 5, 14])
        steps = [sequences.step(members) for members in ([0, 1, 2], [1], [2, 0], [0, 1, 2], [0])]
        found.append(steps)
        if runner.graphs is not None:
            assert runner.graphs.counts.num_replays == 5
            assert not runner.graphs.can_run((sequences.run(0, True, GREEDY, ()),))
    assert found[0] == found[1]
