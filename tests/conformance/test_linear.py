"""Every kind of linear keeps the invariants of `engine/quant/base.py`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from ridgeline.engine.quant import KINDS, build_linear
from ridgeline.engine.quant.base import Linear
from ridgeline.errors import CannotRun
from ridgeline.modelspec.format import (
    BF16,
    FP8,
    FP32,
    INT4,
    INT8,
    NVFP4_WEIGHTS,
    Format,
    blocks,
    dense,
    int4,
)
from ridgeline.modelspec.model import LinearSpec

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SIZES = [(1, 1), (5, 7), (64, 48), (130, 257)]


@dataclass(frozen=True)
class Kind:
    """A format, and how far from the float product it may be: ‖out - ref‖ / ‖ref‖."""

    format: Format
    tolerance: float


CASES = {
    "dense": Kind(dense("float32"), 1e-6),
    "int8": Kind(INT8, 0.02),
    "int4": Kind(INT4, 0.13),
    "int4, groups of 32": Kind(int4(32), 0.13),
    "int4, zero-points": Kind(int4(64, zeros=True), 0.13),
    "blocks": Kind(blocks(8, 32), 0.02),
    "blocks, groups of 16": Kind(blocks(8, 16), 0.02),
    "fp8": Kind(FP8, 0.06),
    "nvfp4": Kind(NVFP4_WEIGHTS, 0.13),
    "bf16": Kind(BF16, 1e-6),
    "fp32": Kind(FP32, 1e-6),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Relative errors of a handful of numbers have a long tail: the same ones every time."""
    torch.manual_seed(0)


@pytest.fixture(params=CASES)
def kind(request: pytest.FixtureRequest) -> Kind:
    return CASES[request.param]


def make(
    kind: Kind, size: tuple[int, int], *, bias: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[Linear, torch.Tensor, torch.Tensor | None]:
    num_out, num_in = size
    spec = LinearSpec(num_out=num_out, num_in=num_in, format=kind.format, bias=bias)
    weight_OI, bias_O = torch.randn(size), torch.randn(num_out) if bias else None
    weight_OI = weight_OI.bfloat16().float()  # bf16 refuses weights that it would round
    return build_linear(spec, weight_OI.clone(), bias_O, CPU, dtype), weight_OI, bias_O


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def test_every_kind_is_in_the_suite() -> None:
    pruned = {"sparse24", "int8_sparse24"}  # take 2:4 weights only: tests/engine/quant
    assert {case.format.kind for case in CASES.values()} == set(KINDS) - pruned


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_rows", [1, 2, 33])
def test_close_to_the_float_product(
    kind: Kind, size: tuple[int, int], num_rows: int, bias: bool
) -> None:
    linear, weight_OI, bias_O = make(kind, size, bias=bias)
    x_TI = torch.randn(num_rows, size[1])
    expected = torch.nn.functional.linear(x_TI.double(), weight_OI.double())
    expected = expected if bias_O is None else expected + bias_O
    y_TO = linear(x_TI)
    assert y_TO.shape == (num_rows, size[0]) and y_TO.dtype == torch.float32
    assert relative(y_TO, expected) < kind.tolerance


def test_rows_do_not_touch_each_other(kind: Kind) -> None:
    linear, _, _ = make(kind, (96, 80))
    x_TI = torch.randn(17, 80)
    x_TI[5] *= 1e4
    alone = torch.cat([linear(row.unsqueeze(0)) for row in x_TI])
    each = (linear(x_TI) - alone).norm(dim=1) / alone.norm(dim=1)
    assert each.max() < 1e-5


def test_the_result_is_the_callers_to_write(kind: Kind) -> None:
    linear, _, _ = make(kind, (8, 16), bias=True)
    x_TI = torch.randn(4, 16)
    before, first = x_TI.clone(), linear(x_TI)
    kept = first.clone()
    first.add_(1)
    assert torch.equal(linear(x_TI), kept)
    assert torch.equal(x_TI, before)


def test_no_rows_and_rows_of_zeros(kind: Kind) -> None:
    linear, _, bias_O = make(kind, (8, 16), bias=True)
    assert linear(torch.zeros(0, 16)).shape == (0, 8)
    assert torch.allclose(linear(torch.zeros(2, 16)), bias_O.expand(2, 8), atol=1e-6)


def test_inputs_that_are_views(kind: Kind) -> None:
    linear, _, _ = make(kind, (8, 16))
    wide = torch.randn(5, 40)
    for view in (wide[:, 3:19], wide[::2, :16], torch.randn(16, 5).t()):
        assert torch.allclose(linear(view), linear(view.contiguous()), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_compute_dtype_goes_in_and_out(kind: Kind, dtype: torch.dtype) -> None:
    linear, weight_OI, _ = make(kind, (64, 48), dtype=dtype)
    x_TI = torch.randn(3, 48)
    y_TO = linear(x_TI.to(dtype))
    assert y_TO.dtype is dtype
    assert relative(y_TO, x_TI.double() @ weight_OI.double().T) < kind.tolerance + 0.01


def test_bytes_are_those_of_the_format(kind: Kind) -> None:
    """What is kept is what the arithmetic says: else prediction and run part."""
    linear, _, _ = make(kind, (64, 256), bias=True)
    spec = LinearSpec(num_out=64, num_in=256, format=kind.format, bias=True)
    assert linear.nbytes == pytest.approx(spec.nbytes, rel=0.05)


def test_an_unknown_kind_is_refused() -> None:
    spec = LinearSpec(num_out=1, num_in=1, format=Format(kind="int3"))
    with pytest.raises(CannotRun, match="dense"):
        build_linear(spec, torch.ones(1, 1), None, CPU, torch.float32)
