"""2:4 weights in INT8: the bits of dense INT8 on every instruction set, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ridgeline._native as _native
from ridgeline.config.settings import Settings
from ridgeline.engine.config import resolve
from ridgeline.engine.kernels.native_int8 import NativeInt8
from ridgeline.engine.kernels.native_linear import ISA_VARIABLE, NativeLinear, packed_bytes
from ridgeline.engine.quant import build_linear, linear_kind
from ridgeline.engine.quant.int8.quantise import quantise
from ridgeline.engine.quant.packed import random_packed
from ridgeline.engine.quant.sparse24 import stored_mask, why_not_int8
from ridgeline.engine.quant.sparse24.int8 import pack_sparse24
from ridgeline.errors import CannotRun
from ridgeline.modelspec.format import SPARSE24_INT8
from ridgeline.modelspec.model import LinearSpec
from tests.engine.quant.test_sparse24 import greedy_tokens, pruned, pruned_model

CPU = torch.device("cpu")
ISAS = _native.linear_isas().split(",")
needs_expansion = pytest.mark.skipif(bool(why_not_int8(CPU)), reason=why_not_int8(CPU))


def spec_of(num_out: int, num_in: int, *, bias: bool = False) -> LinearSpec:
    return LinearSpec(num_out=num_out, num_in=num_in, format=SPARSE24_INT8, bias=bias)


@pytest.mark.parametrize("variant", ISAS)
@pytest.mark.parametrize(("num_out", "num_in"), [(16, 64), (37, 96), (48, 1100)])
def test_bits_of_the_dense_product(
    variant: str, num_out: int, num_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, variant)
    q_OI, scale_O = quantise(pruned(num_out, num_in, num_in).float(), "full")
    bias_O = torch.randn(num_out)
    sparse = NativeLinear(pack_sparse24(q_OI, scale_O), bias_O)
    dense = NativeInt8(q_OI, scale_O, bias_O)
    for num_rows in (1, 2, 5, 12, 13, 24, 33):
        x_TI = torch.randn(num_rows, num_in)
        assert torch.equal(sparse(x_TI), dense(x_TI)), num_rows
    sparse.digits = dense.digits = 2
    x_TI = torch.randn(3, num_in)
    assert torch.equal(sparse(x_TI), dense(x_TI))
    ids = torch.tensor([num_out - 1, 0])
    assert torch.equal(sparse.rows(ids), dense.rows(ids))


def test_five_bits_are_stored_per_weight() -> None:
    assert packed_bytes("int8_sparse24", 64, 128, 0) == 64 * 128 * 5 // 8
    assert SPARSE24_INT8.nbytes(64, 128) == 64 * 128 * 5 // 8 + 64 * 4


def test_weights_with_more_than_two_of_four_are_refused_by_the_kernels() -> None:
    with pytest.raises(ValueError, match="more than two of four"):
        pack_sparse24(torch.ones(16, 32, dtype=torch.int8), torch.ones(16))


def test_random_weights_have_two_of_every_four() -> None:
    packed = random_packed(spec_of(20, 96), torch.Generator().manual_seed(1))
    assert packed is not None
    rows_OI = NativeLinear(packed).rows(torch.arange(20))
    assert stored_mask(rows_OI).sum() == 20 * 48
    assert (rows_OI != 0).sum() > 0.9 * 20 * 48


@needs_expansion
def test_linear_of_a_pruned_weight_is_that_of_int8() -> None:
    weight, x_TI, bias = pruned(32, 64, 7).float(), torch.randn(9, 64), torch.randn(32)
    found = build_linear(spec_of(32, 64, bias=True), weight, bias, CPU, torch.float32)
    assert torch.equal(found(x_TI), NativeInt8(*quantise(weight, "full"), bias)(x_TI))
    describe = linear_kind("int8_sparse24").describe  # type: ignore[attr-defined]
    assert "5 bits" in describe(spec_of(32, 64), CPU)
    with pytest.raises(CannotRun, match=r"sparse already.*ridgeline prune MODEL --sparsity 2:4"):
        build_linear(spec_of(32, 64), torch.randn(32, 64), None, CPU, torch.float32)


def test_kernels_without_expansion_are_refused_with_what_gives_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "portable")
    assert "portable do not expand" in why_not_int8(CPU)
    with pytest.raises(CannotRun, match=r"not faster than INT8 here.*--quantization int8"):
        build_linear(spec_of(32, 64), pruned(32, 64, 1), None, CPU, torch.float32)
    assert "on the CPU only" in why_not_int8(torch.device("cuda"))


@needs_expansion
def test_model_that_was_pruned_answers_as_in_int8(tmp_path: Path) -> None:
    model = pruned_model(tmp_path / "pruned")
    tokens = greedy_tokens(model, quantization="int8")
    for layers in ("native", "torch"):
        found = greedy_tokens(model, quantization="sparse-24-int8", layer_backend=layers)
        assert found == tokens, layers
    with pytest.raises(CannotRun, match=r"not divided between processes.*--quantization int8"):
        resolve(Settings(model=model, quantization="sparse-24-int8", tensor_parallel_size=2))
