"""2:4 sparse linears: the stored form, what is refused, and a model that runs on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ridgeline.engine.engine import Engine
from ridgeline.engine.quant import build_linear, linear_kind
from ridgeline.engine.quant.sparse24 import Sparse24Linear, why_not
from ridgeline.errors import CannotRun
from ridgeline.modelspec.format import SPARSE24
from ridgeline.modelspec.model import LinearSpec
from ridgeline.records import Sampling
from tests.compress.small_llama import SHAPES, random_tensors, write

CPU = torch.device("cpu")
WIDTHS = {48: 64, 24: 32, 128: 128}  # of the small Llama, made fit for torch's layout


def pruned(num_out: int, num_in: int, seed: int) -> torch.Tensor:
    """A random weight of which two in four are zero, in bfloat16."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_out, num_in, generator=random)
    return (weight * stored_mask_of_largest(weight)).bfloat16()


def stored_mask_of_largest(weight_OI: torch.Tensor) -> torch.Tensor:
    groups = weight_OI.abs().view(len(weight_OI), -1, 4)
    kept = groups.topk(2, -1).indices
    return torch.zeros_like(groups).scatter_(-1, kept, 1.0).view_as(weight_OI)


def built(weight_OI: torch.Tensor, bias_O: torch.Tensor | None, dtype: torch.dtype) -> object:
    num_out, num_in = weight_OI.shape
    spec = LinearSpec(num_in=num_in, num_out=num_out, bias=bias_O is not None, format=SPARSE24)
    return build_linear(spec, weight_OI, bias_O, CPU, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_out", "num_in", "rows"), [(32, 64, 1), (96, 192, 5), (64, 64, 0)])
def test_product_is_that_of_the_dense_weight(
    dtype: torch.dtype, num_out: int, num_in: int, rows: int
) -> None:
    weight = pruned(num_out, num_in, rows).to(dtype)
    bias = torch.randn(num_out).to(dtype)
    linear = built(weight, bias, dtype)
    assert isinstance(linear, Sparse24Linear)
    assert torch.equal(linear.widen(), weight)
    x = torch.randn(rows, num_in).to(dtype)
    assert torch.equal(linear(x), F.linear(x, weight, bias))
    assert linear.nbytes == SPARSE24.nbytes(num_out, num_in) + bias.nbytes
    assert linear.nbytes - bias.nbytes == weight.nbytes * 9 // 16


def test_what_torch_cannot_store_is_refused() -> None:
    dense, sparse = torch.randn(32, 64).bfloat16(), pruned(32, 64, 3)
    for weight, dtype, reason in (
        (dense, torch.bfloat16, "more than two of four"),
        (sparse, torch.float32, "in 16 bits"),
        (pruned(32, 96, 1), torch.bfloat16, "no multiple"),
        (pruned(24, 64, 1), torch.bfloat16, "no multiple"),
    ):
        with pytest.raises(CannotRun, match=reason):
            built(weight, None, dtype)
    assert not why_not((32, 64), CPU, torch.bfloat16)
    assert "slower than dense" in linear_kind("sparse24").describe(None, CPU)  # type: ignore[attr-defined]


def pruned_model(folder: Path) -> str:
    """A small Llama whose layers are 2:4 sparse, with sizes that torch can store."""
    tensors = random_tensors()
    for layer in range(4):
        for number, (name, (num_out, num_in)) in enumerate(SHAPES.items()):
            key = f"model.layers.{layer}.{name}.weight"
            tensors[key] = pruned(WIDTHS[num_out], WIDTHS[num_in], 10 * layer + number) / 8
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(64).bfloat16()
    tensors["model.norm.weight"] = torch.ones(64).bfloat16()
    tensors["model.embed_tokens.weight"] = torch.randn(4096, 64).bfloat16() / 8
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
    return str(write(folder, tensors, **sizes))


def greedy_tokens(model: str, **settings: Any) -> tuple[int, ...]:
    sampling = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)
    with Engine.open(model, **settings) as engine:
        [completion] = engine.generate([[5, 9, 300, 7]], sampling)
        return completion.tokens


@pytest.mark.slow
def test_model_that_was_pruned_answers_as_its_dense_form(tmp_path: Path) -> None:
    model = pruned_model(tmp_path / "pruned")
    outputs = [
        greedy_tokens(model, dtype="bfloat16", quantization=quantization)
        for quantization in (None, "sparse-24")
    ]
    assert outputs[0] == outputs[1]
