"""Triton attention and layers, in the interpreter, against torch operators: prompts and graphs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.kv_format import kv_format
from ridgeline.engine.attention.triton import TritonAttention
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.execution.graphs.decode import DecodeGraphs, run_eagerly
from ridgeline.engine.execution.layers.fused import TritonForward
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.model.decoder import Decoder
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.rewrite import with_kv_dtype
from tests.conformance.tiny_models import make_model
from tests.engine.execution.test_decode_graphs import BLOCK_SIZE, NUM_BLOCKS, Sequences
from tests.engine.execution.test_decode_graphs import make_runner as make_plain

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]


@pytest.mark.parametrize(
    ("name", "kv"),
    [("llama", "float32"), ("qwen3", "float32"), ("qwen3", "int8"), ("qwen3", "fp8")],
)
def test_triton_steps_choose_the_tokens_of_torch(name: str, kv: str, tmp_path: Path) -> None:
    """The cache of the one is in the order of a GPU, that of the other in the order of the CPU."""
    from tests.engine.kernels.triton.interpreter import repair_interpreter

    repair_interpreter()
    make_model(name, tmp_path)
    spec = with_kv_dtype(load_spec(str(tmp_path)), kv)
    plain = load_decoder(
        str(tmp_path), spec, device="cpu", compute_dtype=torch.float32, layer_backend="torch"
    )
    sizes = (NUM_BLOCKS + 1, BLOCK_SIZE, torch.float32, "cpu")
    cache = KvCache.allocate(spec, *sizes, kv_format(kv, "cuda"))
    attention = TritonAttention(spec, cache)
    fused = Decoder(plain.body, TritonForward(plain.body), plain.lm_head, plain.nbytes)
    runner = TorchRunner(fused, cache, attention)
    runner.use_graphs(DecodeGraphs(fused, attention, 64, run_eagerly))
    ours = Sequences(runner, [3, 9, 5])
    reference = Sequences(make_plain((spec, plain), graphs=False), [3, 9, 5])
    assert ours.tokens == reference.tokens
    for members in ([0, 1, 2], [1], [2, 0]):
        assert ours.step(members) == reference.step(members)
    drafts = {0: (4, 5), 1: (), 2: (7,)}.__getitem__
    assert ours.step(range(3), drafts=drafts) == reference.step(range(3), drafts=drafts)


def test_latent_rows_are_read_by_triton(tmp_path: Path) -> None:
    """Of a model with latent attention: its layers are torch's, its decode kernel is ours."""
    from tests.engine.kernels.triton.interpreter import repair_interpreter

    repair_interpreter()
    make_model("youtu", tmp_path)
    spec = load_spec(str(tmp_path))
    plain = load_decoder(
        str(tmp_path), spec, device="cpu", compute_dtype=torch.float32, layer_backend="torch"
    )
    cache = KvCache.allocate(spec, NUM_BLOCKS + 1, BLOCK_SIZE, torch.float32, "cpu")
    attention = TritonAttention(spec, cache)
    runner = TorchRunner(plain, cache, attention)
    runner.use_graphs(DecodeGraphs(plain, attention, 64, run_eagerly))
    ours = Sequences(runner, [3, 9])
    reference = Sequences(make_plain((spec, plain), graphs=False), [3, 9])
    for members in ([0, 1], [1]):
        assert ours.step(members) == reference.step(members)
