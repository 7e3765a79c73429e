"""Layers with fused operators compute what the plain ones do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ridgeline.engine.attention import build_attention
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.execution.layers import layer_backend_of
from ridgeline.engine.execution.layers.fused import FusedForward
from ridgeline.engine.kernels.pointwise import COMPILE_CLOCK, TORCH, compiled_ops
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.scheduler.plan import Run
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.model import ModelSpec
from tests.conformance.tiny_models import make_model

CPU = torch.device("cpu")
FUSED = ("llama", "qwen3", "mistral")


def load(name: str, path: Path) -> tuple[ModelSpec, Decoder]:
    make_model(name, path)
    spec = load_spec(str(path))
    return spec, load_decoder(
        str(path), spec, device="cpu", compute_dtype=torch.float32, layer_backend="torch"
    )


def states(forward: object, spec: ModelSpec, attention: str) -> Tensor:
    cache = KvCache.allocate(spec, 12, 4, torch.float32, "cpu")
    runs = [Run(0, 0, (3, 4, 5, 6, 7), (2, 5), None), Run(1, 0, (9,), (7,), None)]
    tokens = torch.tensor([token for run in runs for token in run.tokens])
    positions = torch.tensor([0, 1, 2, 3, 4, 0])
    attend = build_attention(attention, spec, cache).prepare(runs)
    with torch.inference_mode():
        return forward(tokens, positions, 5, attend)  # type: ignore[operator, no-any-return]


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("attention", ["torch", "tables"])
def test_fused_layers_give_the_states_of_the_plain_ones(
    name: str, attention: str, tmp_path: Path
) -> None:
    spec, decoder = load(name, tmp_path)
    fused = FusedForward(decoder.body, TORCH)
    want = states(decoder.forward, spec, attention)
    assert torch.allclose(states(fused, spec, attention), want, atol=2e-5)


@pytest.mark.slow
def test_compiled_operators_give_the_states_of_the_plain_ones(tmp_path: Path) -> None:
    spec, decoder = load("llama", tmp_path)
    want = states(decoder.forward, spec, "tables")
    fused = FusedForward(decoder.body, compiled_ops())
    assert torch.allclose(states(fused, spec, "tables"), want, atol=2e-5)
    assert set(COMPILE_CLOCK.seconds) >= {"rms_norm", "add_rms_norm", "silu_mul", "rotate"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma3", "norms elsewhere"),
        ("qwen3-moe", "experts"),
        ("deepseek-v3", "latent"),
    ],
)
def test_other_architectures_are_refused_with_the_reason(
    name: str, reason: str, tmp_path: Path
) -> None:
    make_model(name, tmp_path)
    spec = load_spec(str(tmp_path))
    why_not = layer_backend_of("compiled").why_not(spec, CPU, torch.float32)
    assert any(reason in why for why in why_not), why_not


def test_triton_layers_need_cuda(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    spec = load_spec(str(tmp_path))
    why_not = layer_backend_of("triton").why_not(spec, CPU, torch.float32)
    assert why_not == ("runs on CUDA only, not on cpu",)
