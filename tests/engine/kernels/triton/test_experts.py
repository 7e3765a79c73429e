"""Expert products in Triton against each token's experts, one by one, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.model.moe import routed_experts
from ridgeline.engine.quant.dense import DenseLinear
from ridgeline.modelspec.checkpoints.load import load_spec
from tests.conformance.tiny_models import make_model
from tests.engine.kernels.triton.interpreter import DEVICE

pytestmark = pytest.mark.slow


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def chosen_experts(num_tokens: int, num_chosen: int, experts: list[int]) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    rows = [torch.randperm(len(experts), generator=generator) for _ in range(num_tokens)]
    return torch.tensor(experts)[torch.stack(rows)[:, :num_chosen]]


def expected(x: Tensor, weight: Tensor, expert: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    out = torch.zeros_like(x, dtype=torch.float64)
    for token in range(len(x)):
        for share, index in zip(weight[token], expert[token], strict=True):
            gate, up = (gate_up[index].double() @ x[token].double()).chunk(2)
            out[token] += share.double() * (down[index].double() @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
@pytest.mark.parametrize("experts", [[0, 1, 2, 3], [1, 4]], ids=["all", "few"])
def test_experts_of_each_token(num_tokens: int, experts: list[int]) -> None:
    from ridgeline.engine.kernels.triton.experts import experts_mlp

    x, gate_up, down = random(num_tokens, 72), random(5, 80, 72, seed=1), random(5, 72, 40, seed=2)
    expert = chosen_experts(num_tokens, 2, experts)
    weight = random(num_tokens, 2, seed=3).softmax(1)
    arguments = [tensor.to(DEVICE) for tensor in (x, weight, expert, gate_up, down)]
    got = experts_mlp(*arguments).cpu().double()
    want = expected(x, weight, expert, gate_up, down)
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3-moe", "glm4-moe", "gpt-oss"])
def test_expert_layers_of_a_model_once_stacked(family: str, tmp_path: Path) -> None:
    """The grouped kernel gives what one expert after another gives; gpt-oss has another gate."""
    make_model(family, tmp_path)
    spec = load_spec(str(tmp_path))
    decoder = load_decoder(
        str(tmp_path), spec, device=DEVICE, compute_dtype=torch.float32, layer_backend="torch"
    )
    found = routed_experts(decoder.body.blocks)
    assert found
    for experts in found:
        experts.stacked = None
        x = random(7, spec.hidden_size).to(DEVICE)
        want = experts(x)
        experts.stack()
        assert experts.has_fixed_shapes == (family != "gpt-oss")
        torch.testing.assert_close(experts(x), want, atol=1e-4, rtol=1e-4)
        if experts.stacked is not None:  # no second copy of the weights
            first = experts.experts[0].down
            assert isinstance(first, DenseLinear)
            assert first.weight_OI.data_ptr() == experts.stacked[1].data_ptr()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_experts_with_codes(dtype: torch.dtype) -> None:
    from ridgeline.engine.kernels.triton.experts import experts_mlp

    largest = 127 if dtype == torch.int8 else 448
    floats = (random(4, 64, 48, seed=1), random(4, 48, 32, seed=2))
    scales = [w.abs().amax(2) / largest for w in floats]
    codes = [
        (w / s.unsqueeze(2)).round().to(dtype)
        if dtype == torch.int8
        else (w / s.unsqueeze(2)).to(dtype)
        for w, s in zip(floats, scales, strict=True)
    ]
    x, expert = random(3, 48), chosen_experts(3, 3, [0, 1, 2, 3])
    weight = random(3, 3, seed=3).softmax(1)
    arguments = [tensor.to(DEVICE) for tensor in (x, weight, expert, *codes)]
    got = experts_mlp(*arguments, scales=(scales[0].to(DEVICE), scales[1].to(DEVICE)))
    dense = [q.float() * s.unsqueeze(2) for q, s in zip(codes, scales, strict=True)]
    want = expected(x, weight, expert, *dense)
    torch.testing.assert_close(got.cpu().double(), want, atol=1e-3, rtol=1e-4)
