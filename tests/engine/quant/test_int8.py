"""INT8 linears: kernels proven exact, scales that cannot saturate, and the error that rounding
leaves.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.engine.quant import build_linear, linear_kind
from ridgeline.engine.quant.int8 import Int8Linear, choose, exact
from ridgeline.engine.quant.int8.base import Gemm
from ridgeline.engine.quant.int8.quantise import quantise
from ridgeline.engine.quant.int8.reference import ReferenceGemm
from ridgeline.errors import CannotRun
from ridgeline.modelspec.format import INT8
from ridgeline.modelspec.model import LinearSpec

CPU = torch.device("cpu")
SIZES = [(7, 33), (1, 1), (64, 256), (65, 1023), (257, 64)]


def build(weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None, dtype=torch.float32):
    num_out, num_in = weight_OI.shape
    spec = LinearSpec(num_out=num_out, num_in=num_in, format=INT8, bias=bias_O is not None)
    return build_linear(spec, weight_OI, bias_O, CPU, dtype)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def test_the_registry_gives_the_int8_linear() -> None:
    assert linear_kind("int8") is Int8Linear


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_rows", [1, 5, 64])
def test_products_equal_float_products_of_the_same_integers(
    size: tuple[int, int], num_rows: int
) -> None:
    """Same rounded weights and inputs, multiplied in float64: only the arithmetic may differ."""
    weight_OI, x_TI = torch.randn(size), torch.randn(num_rows, size[1]) * 10
    linear = build(weight_OI)
    q_OI, scale_O = quantise(weight_OI, choose.choose(CPU, *size).weight_range)
    expected = ReferenceGemm(q_OI, scale_O)(x_TI)
    one_unit = (x_TI.abs().amax(1) / 127).max() * weight_OI.abs().max()  # a half rounded otherwise
    assert (linear(x_TI) - expected).abs().max() < 1.1 * one_unit
    assert relative(linear(x_TI), expected) < 2e-3


@pytest.mark.parametrize("name", choose.GEMMS)
@pytest.mark.parametrize("size", SIZES)
def test_integers_are_multiplied_exactly(name: str, size: tuple[int, int]) -> None:
    """Rows whose largest is 127 have scale 1: nothing is rounded, nothing may be lost."""
    q_OI, _ = quantise(torch.randn(size), "pair_safe")
    x_TI = torch.randint(-127, 128, (6, size[1]))
    x_TI[:, 0] = 127
    y_TO = choose.gemm_kind(name).pack(q_OI, torch.ones(size[0]))(x_TI.float())
    assert relative(y_TO, x_TI.double() @ q_OI.double().T) < 3e-7


@pytest.mark.parametrize("size", [(64, 256), (65, 1023), (257, 64)])
def test_rounding_error_is_about_one_percent(size: tuple[int, int]) -> None:
    weight_OI, x_TI, bias_O = torch.randn(size), torch.randn(9, size[1]), torch.randn(size[0])
    expected = x_TI.double() @ weight_OI.double().T + bias_O
    error = relative(build(weight_OI, bias_O)(x_TI), expected)
    assert 1e-4 < error < 0.02  # below: it did not quantise at all


@pytest.mark.parametrize("value", [1.0, -1.0, 1e-20, 1e20])
def test_extreme_constant_rows_are_exact(value: float) -> None:
    """Every weight and input at its largest: what a saturating kernel gets most wrong."""
    weight_OI, x_TI = torch.full((16, 512), value), torch.full((3, 512), 2.0)
    assert relative(build(weight_OI)(x_TI), x_TI.double() @ weight_OI.double().T) < 0.01


def test_zero_rows_and_empty_batches() -> None:
    linear = build(torch.randn(8, 16))
    assert linear(torch.zeros(2, 16)).eq(0).all()
    assert linear(torch.zeros(0, 16)).shape == (0, 8)
    assert build(torch.zeros(8, 16))(torch.randn(2, 16)).eq(0).all()


@pytest.mark.parametrize("name", choose.GEMMS)
def test_a_row_does_not_depend_on_its_neighbours(name: str) -> None:
    """Bit for bit: the scale is the row's own, and whole numbers add up in any order."""
    q_OI, scale_O = quantise(torch.randn(96, 200), "pair_safe")
    gemm, x_TI = choose.gemm_kind(name).pack(q_OI, scale_O), torch.randn(17, 200)
    x_TI[3] *= 1000
    alone = torch.cat([gemm(row.unsqueeze(0)) for row in x_TI])
    assert torch.equal(gemm(x_TI), alone)


@pytest.mark.parametrize("name", choose.GEMMS)
def test_every_kernel_rounds_alike(name: str) -> None:
    q_OI, scale_O = quantise(torch.randn(96, 200), "pair_safe")
    x_TI = torch.randn(17, 200) * torch.logspace(-6, 6, 17).unsqueeze(1)
    found, expected = choose.gemm_kind(name).pack(q_OI, scale_O)(x_TI), ReferenceGemm(q_OI, scale_O)
    each = (found - expected(x_TI)).norm(dim=1) / expected(x_TI).norm(dim=1)
    assert each.max() < 2e-3  # halves may round either way


def test_int8_linear_satisfies_the_protocol() -> None:
    x_TI = torch.randn(3, 32)
    before = x_TI.clone()
    linear = build(torch.randn(16, 32), torch.randn(16), dtype=torch.bfloat16)
    y_TO = linear(x_TI.to(torch.bfloat16))
    assert y_TO.dtype is torch.bfloat16 and y_TO.shape == (3, 16)
    linear(x_TI)
    assert torch.equal(x_TI, before)
    assert linear.nbytes == 16 * 32 + 4 * 16 + 4 * 16


def test_formats_it_cannot_compute_are_refused() -> None:
    grouped = LinearSpec(
        num_out=8, num_in=16, format=type(INT8)(kind="int8", bits=8, group_size=8, scale_bytes=4)
    )
    with pytest.raises(CannotRun, match="one scale per output row"):
        build_linear(grouped, torch.randn(8, 16), None, CPU, torch.float32)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 2**31), st.sampled_from([1, 8]))
def test_pair_safe_weights_never_sum_past_128(
    num_out: int, num_in: int, seed: int, power: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight_OI = torch.randn(num_out, num_in, generator=generator) ** power
    q_OI, scale_O = quantise(weight_OI, "pair_safe")
    even = num_in // 2 * 2
    pairs = q_OI.int()[:, 0:even:2] + q_OI.int()[:, 1:even:2]
    assert q_OI.int().abs().max() <= 127
    assert even == 0 or pairs.abs().max() <= 128
    rounding = (q_OI * scale_O[:, None] - weight_OI).abs() / scale_O[:, None]
    assert rounding.max() <= 0.5 + 1e-4


def test_pair_safe_scales_beat_seven_bits() -> None:
    weight_OI = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    q_OI, scale_O = quantise(weight_OI, "pair_safe")
    top_O1 = weight_OI.abs().amax(1, keepdim=True) / 63
    seven_bits = (weight_OI / top_O1).round() * top_O1
    assert relative(q_OI * scale_O[:, None], weight_OI) < 0.75 * relative(seven_bits, weight_OI)


@pytest.mark.parametrize("name", choose.GEMMS)
@pytest.mark.parametrize("size", SIZES)
def test_every_kernel_is_exact_or_excluded_with_a_reason(name: str, size: tuple[int, int]) -> None:
    """With pair-safe weights every kernel that can run on a CPU is exact, whatever its ISA."""
    kind = choose.gemm_kind(name)
    assert kind.refusal(CPU, *size) is None
    assert exact.error_of(kind, "pair_safe", CPU, *size) is None


class Saturating:
    """A planted fault: neighbouring products added in 16 bits, as vpmaddubsw does."""

    def __init__(self, q_OI: torch.Tensor, scale_O: torch.Tensor) -> None:
        self.q_OI, self.scale_O = q_OI.int(), scale_O

    @staticmethod
    def refusal(device: torch.device, num_out: int, num_in: int) -> None:
        return None

    @staticmethod
    def pack(q_OI: torch.Tensor, scale_O: torch.Tensor) -> Gemm:
        return Saturating(q_OI, scale_O)

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        u8_TI = x_TI.round().int() + 128  # called with whole numbers whose scale is 1
        products = u8_TI[:, None, :] * self.q_OI
        if products.shape[2] % 2:
            products = torch.nn.functional.pad(products, (0, 1))
        pairs = products.unflatten(2, (-1, 2)).sum(3).clamp(-(2**15), 2**15 - 1)
        return (pairs.sum(2) - 128 * self.q_OI.sum(1)).float() * self.scale_O


class OffByOne(ReferenceGemm):
    """A planted fault: one unit too many in a sum of tens of thousands."""

    @staticmethod
    def pack(q_OI: torch.Tensor, scale_O: torch.Tensor) -> Gemm:
        return OffByOne(q_OI, scale_O)

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return super().__call__(x_TI) + 1


def test_self_test_detects_saturation_that_pair_safe_weights_avoid() -> None:
    assert "wrong with full" in str(exact.error_of(Saturating, "full", CPU, 16, 64))
    assert exact.error_of(Saturating, "pair_safe", CPU, 16, 64) is None
    assert exact.error_of(Saturating, "pair_safe", CPU, 7, 33) is None
    assert "wrong" in str(exact.error_of(OffByOne, "full", CPU, 16, 64))


def test_no_exact_kernel_is_an_error_with_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "gemm_kind", lambda name: OffByOne)
    choose.choose.cache_clear()
    try:
        with pytest.raises(CannotRun, match=r"fbgemm: wrong.*int_mm: wrong"):
            choose.choose(CPU, 8, 24)
    finally:
        choose.choose.cache_clear()


def test_faulty_kernel_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    real = choose.gemm_kind
    monkeypatch.setattr(choose, "gemm_kind", lambda n: OffByOne if n == "fbgemm" else real(n))
    monkeypatch.setattr(choose, "order", lambda device: ("fbgemm", "onednn"))
    choose.choose.cache_clear()
    try:
        chosen = choose.choose(CPU, 8, 24)
    finally:
        choose.choose.cache_clear()
    assert chosen.name == "onednn" and "fbgemm: wrong" in chosen.reason


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_int8_on_cuda() -> None:
    weight_OI, x_TI = torch.randn(64, 128), torch.randn(3, 128)
    spec = LinearSpec(num_out=64, num_in=128, format=INT8)
    linear = build_linear(spec, weight_OI, None, torch.device("cuda"), torch.float32)
    assert relative(linear(x_TI.cuda()).cpu(), x_TI.double() @ weight_OI.double().T) < 0.02
