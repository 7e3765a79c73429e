"""Adapters in captured decode steps: rows of several adapters, against the eager path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from ridgeline.engine.adapters.registry import AdapterRegistry
from ridgeline.engine.adapters.stacked import AdapterStack
from ridgeline.engine.adapters.weights import read_adapter
from ridgeline.engine.attention import build_attention
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.tables import TableAttention
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.execution.graphs.decode import DecodeGraphs
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.scheduler.plan import Run
from ridgeline.errors import BadInput
from ridgeline.modelspec.checkpoints.load import load_spec
from tests.conformance.tiny_models import make_model
from tests.engine.adapters.make_adapter import LLAMA, save_adapter
from tests.engine.execution.recorded_graphs import RecordedCapture
from tests.engine.execution.test_decode_graphs import BLOCK_SIZE, NUM_BLOCKS, Sequences

ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"modules": list(LLAMA)},
    "attention": {"modules": ["q_proj", "v_proj"], "rank": 2, "use_rslora": True},
}


class AdaptedSequences(Sequences):
    """Sequences of which each uses an adapter, or none (0)."""

    def __init__(self, runner: TorchRunner, lengths: list[int], adapters: list[int]) -> None:
        self.adapters = adapters
        super().__init__(runner, lengths)

    def run(self, index: int, *args: Any) -> Run:
        return replace(super().run(index, *args), adapter=self.adapters[index])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model("llama", tmp_path / "base")
    for seed, (name, fields) in enumerate(ADAPTERS.items()):
        save_adapter(tmp_path / name, tmp_path / "base", seed=seed, **fields)
    return tmp_path


def adapted(folder: Path, *, graphs: bool) -> tuple[TorchRunner, AdapterRegistry]:
    path = str(folder / "base")
    spec = load_spec(path)
    decoder = load_decoder(
        path, spec, device="cpu", compute_dtype=torch.float32, layer_backend="torch"
    )
    registry = AdapterRegistry(decoder, 3, 4, stacked=graphs)
    for name in ADAPTERS:
        registry.load(name, str(folder / name))
    cache = KvCache.allocate(spec, NUM_BLOCKS + 1, BLOCK_SIZE, torch.float32, "cpu")
    attention = build_attention("tables", spec, cache)
    assert isinstance(attention, TableAttention)
    runner = TorchRunner(decoder, cache, attention)
    runner.use_adapters(registry)
    if graphs:
        runner.use_graphs(
            DecodeGraphs(decoder, attention, 64, RecordedCapture(), adapters=registry)
        )
    return runner, registry


def test_rows_of_several_adapters_choose_the_tokens_of_the_eager_path(folder: Path) -> None:
    found = []
    for graphs in (False, True):
        runner, registry = adapted(folder, graphs=graphs)
        first, second = (registry.id_of(name) for name in ADAPTERS)
        sequences = AdaptedSequences(runner, [9, 5, 14, 9], [first, 0, second, 0])
        drafts = {0: (4, 5), 1: (), 2: (7,), 3: ()}.__getitem__
        steps = [sequences.step(members) for members in ([0, 1, 2, 3], [1], [2, 0], [3, 2])]
        steps.append(sequences.step(range(4), drafts=drafts))
        found.append((steps, sequences.tokens))
        if runner.graphs is not None:
            assert runner.graphs.counts.num_replays == 5
            registry.unload("attention")
            with pytest.raises(BadInput, match="was unloaded"):
                sequences.step([2])
            registry.load("again", str(folder / "attention"))
            assert sequences.step([2])
    assert found[0][0] == found[1][0]
    steps = found[0][0][0]
    assert len(set(steps)) > 1


def test_a_place_is_cleared_before_it_is_used_again(folder: Path) -> None:
    spec = load_spec(str(folder / "base"))
    both, fresh = (AdapterStack(spec, 2, 4, torch.device("cpu"), torch.float32) for _ in range(2))
    first, second = (read_adapter(folder / name, spec, 4) for name in ADAPTERS)
    both.put(0, first)
    both.put(0, second)
    fresh.put(0, second)
    site, x_TI = (0, ("q", "k", "v")), torch.randn(3, spec.hidden_size)
    attention = spec.layers[0].attention
    width = sum(linear.num_out for linear in (attention.q, attention.k, attention.v))
    outputs = []
    for stack in (both, fresh):
        y_TO = torch.zeros(3, width)
        stack.add_to(site, y_TO, x_TI, stack.mask(torch.tensor([0, -1, 1])))
        outputs.append(y_TO)
    assert torch.equal(*outputs)
    assert outputs[0][0].any() and not outputs[0][1:].any()
