"""Weight formats on a GPU give the products of their dequantised weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.kernels.scaled_products import quantise_rows
from ridgeline.engine.quant import build_linear
from ridgeline.engine.quant.int4.quantise import quantise
from ridgeline.engine.quant.sparse24 import Sparse24Linear
from ridgeline.modelspec.format import FP8, INT8, SPARSE24, Format, int4
from ridgeline.modelspec.model import LinearSpec

SIZES = [(256, 128), (6144, 4096), (96, 14336)]
ROWS = [1, 3, 16, 33, 64, 65, 200]
ROUNDING = 2**-7  # of bfloat16 results, and of bfloat16 weights where they are widened


def dequantised(format: Format, weight_OI: Tensor) -> Tensor:
    """The weight as its format stores it, in float64."""
    if format.kind == "int4":
        assert format.group_size is not None
        return (
            quantise(weight_OI, format.group_size, zeros=format.zero_bits > 0)
            .dense(format.group_size)
            .double()
        )
    q_OI, scale_O1 = quantise_rows(weight_OI, "int8" if format.kind == "int8" else "fp8")
    return q_OI.double() * scale_O1.double()


def rounded(format: Format, x_TI: Tensor) -> Tensor:
    """The rows as the product sees them, in float64."""
    if format.kind == "int4":
        return x_TI.double()
    p_TI, scale_T1 = quantise_rows(x_TI, "int8" if format.kind == "int8" else "fp8")
    return p_TI.double() * scale_T1.double()


@pytest.mark.parametrize(
    "format", [INT8, FP8, int4(), int4(64, zeros=True)], ids=["int8", "fp8", "int4", "int4-zeros"]
)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_dequantised_weights(
    format: Format, size: tuple[int, int], bias: bool
) -> None:
    torch.manual_seed(1)
    weight_OI = (torch.randn(size) * 0.02).bfloat16().cuda()
    bias_O = torch.randn(size[0]).bfloat16().cuda() if bias else None
    spec = LinearSpec(num_out=size[0], num_in=size[1], format=format, bias=bias)
    linear = build_linear(spec, weight_OI, bias_O, torch.device("cuda"), torch.bfloat16)
    wide_OI = dequantised(format, weight_OI)
    for num_rows in ROWS:
        x_TI = torch.randn(num_rows, size[1]).bfloat16().cuda()
        want = F.linear(rounded(format, x_TI), wide_OI)
        want = want if bias_O is None else want + bias_O.double()
        found = linear(x_TI)
        assert found.dtype == torch.bfloat16
        error = ((found.double() - want).norm() / want.norm()).item()
        assert error < ROUNDING, (num_rows, error)


def test_rows_of_int8_do_not_depend_on_their_batch() -> None:
    """Sums are exact, so that the kernel for few rows and the one for many agree bit for bit."""
    spec = LinearSpec(num_out=512, num_in=1024, format=INT8)
    weight_OI = torch.randn(512, 1024).bfloat16().cuda()
    linear = build_linear(spec, weight_OI, None, torch.device("cuda"), torch.bfloat16)
    x_TI = torch.randn(100, 1024).bfloat16().cuda()
    alone = torch.cat([linear(row.unsqueeze(0)) for row in x_TI])
    assert (linear(x_TI) - alone).abs().max() <= 2**-7 * alone.abs().max()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_sparse_products_are_those_of_the_dense_weight(size: tuple[int, int], bias: bool) -> None:
    """Eagerly and from a graph."""
    torch.manual_seed(1)
    weight_OI = (torch.randn(size) * 0.02).bfloat16().cuda()
    groups = weight_OI.abs().view(size[0], -1, 4)
    mask = torch.zeros_like(groups).scatter_(-1, groups.topk(2, -1).indices, 1.0)
    weight_OI = (weight_OI * mask.view(size)).contiguous()
    bias_O = torch.randn(size[0]).bfloat16().cuda() if bias else None
    spec = LinearSpec(num_out=size[0], num_in=size[1], format=SPARSE24, bias=bias)
    linear = build_linear(spec, weight_OI, bias_O, torch.device("cuda"), torch.bfloat16)
    assert isinstance(linear, Sparse24Linear)
    assert torch.equal(linear.widen(), weight_OI)
    for num_rows in ROWS:
        x_TI = torch.randn(num_rows, size[1]).bfloat16().cuda()
        want = F.linear(x_TI.double(), weight_OI.double())
        want = want if bias_O is None else want + bias_O.double()
        found = linear(x_TI)
        bound = ROUNDING * want.abs().max()
        assert float((found.double() - want).abs().max()) < bound
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = linear(x_TI)
        graph.replay()
        assert torch.equal(captured, found)
