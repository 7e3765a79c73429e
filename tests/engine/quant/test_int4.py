"""INT4 and bf16 linears: the kernels against slow arithmetic, bit for bit against themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ridgeline._native as _native
from ridgeline.engine.kernels.native_linear import (
    ISA_VARIABLE,
    NativeLinear,
    Packed,
    pack_lines,
    quantise_rows,
)
from ridgeline.engine.quant import build_linear
from ridgeline.engine.quant.int4.linear import pack
from ridgeline.engine.quant.int4.quantise import Int4Weights, quantise
from ridgeline.engine.quant.int4.reference import MOST, multiply
from ridgeline.engine.quant.packed import random_packed
from ridgeline.errors import CannotRun
from ridgeline.modelspec.format import BF16, INT8, Format, int4
from ridgeline.modelspec.model import LinearSpec

CPU = torch.device("cpu")
ISAS = _native.linear_isas().split(",")
TILES = "avx512amx"
SIZES = [(1, 1), (7, 33), (64, 256), (65, 1023), (257, 64)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Relative errors of a handful of numbers have a long tail: the same ones every time."""
    torch.manual_seed(0)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def native(weights: Int4Weights, group_size: int, isa: str = "auto") -> NativeLinear:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ISA_VARIABLE, isa)
        return NativeLinear(pack(weights, group_size))


def of_kind(kind: str, num_out: int, num_in: int) -> Packed:
    """A random packed weight of any kind, its scales all different."""
    if kind == "bf16":
        weight_OI = torch.randn(num_out, num_in).bfloat16()
        return Packed("bf16", num_out, num_in, 0, pack_lines("bf16", weight_OI, 0))
    if kind == "fp32":
        lines = pack_lines("fp32", torch.randn(num_out, num_in), 0)
        return Packed("fp32", num_out, num_in, 0, lines)
    if kind == "int4":
        return pack(quantise(torch.randn(num_out, num_in), 32, zeros=True), 32)
    packed = random_packed(
        LinearSpec(num_out=num_out, num_in=num_in, format=INT8), torch.Generator()
    )
    assert packed is not None and packed.factors is not None
    packed.factors.uniform_(0.5, 2.0)
    return packed


def sums_by_tiles(kind: str, isa: str) -> bool:
    """Whether sums of floats are made in the tiles' order."""
    return kind == "bf16" and (isa == TILES or (isa == "auto" and TILES in ISAS))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("size", SIZES)
def test_products_match_the_reference(
    size: tuple[int, int], group_size: int, zeros: bool, isa: str
) -> None:
    weights = quantise(torch.randn(size), group_size, zeros=zeros)
    linear = native(weights, group_size, isa)
    for num_rows in (1, 3, 8, 50):
        x_TI = torch.randn(num_rows, size[1]) * torch.logspace(-3, 3, num_rows).unsqueeze(1)
        each = (linear(x_TI) - multiply(weights, x_TI, group_size)).norm(dim=1)
        assert (each / multiply(weights, x_TI, group_size).norm(dim=1)).max() < 3e-3


@pytest.mark.parametrize("num_rows", [2, 9, 40])
@pytest.mark.parametrize("zero", [0, 8, 15, 128])
@pytest.mark.parametrize("isa", ISAS)
def test_sums_are_exact_at_the_largest_products(isa: str, zero: int, num_rows: int) -> None:
    """All nibbles 15 or 0 against all activations at their largest, and any zero-point: what sums
    of 16 bits could lose, bytes that hold a sum of both, and floats that hold whole numbers."""
    sign_OI = torch.where(torch.rand(48, 512) < 0.5, 0, 15).to(torch.uint8)
    sign_OI[:16], sign_OI[16:32] = 15, 0
    one_OG = torch.ones(48, 4, dtype=torch.float16)
    zero_OG = torch.full((48, 4), zero, dtype=torch.uint8)
    linear = native(Int4Weights(sign_OI, one_OG, zero_OG, torch.ones(48)), 128, isa)
    x_TI = torch.where(torch.rand(num_rows, 512) < 0.5, -MOST, MOST).float()
    x_TI[0], x_TI[1] = MOST, -MOST
    assert torch.equal(linear(x_TI).double(), x_TI.double() @ (sign_OI.double() - zero).T)


@pytest.mark.slow
@pytest.mark.parametrize(("num_out", "num_in"), [(2050, 515), (70, 1100)])
@pytest.mark.parametrize("kind", ["int4", "int8", "bf16", "fp32"])
def test_the_same_bits_on_every_isa_in_any_batch_and_on_any_threads(
    kind: str, num_out: int, num_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some kernels ask memory otherwise from 1,024 inputs on."""
    packed, x_TI = of_kind(kind, num_out, num_in), torch.randn(131, num_in)
    x_TI[5] *= 1e4
    before, found = torch.get_num_threads(), []
    try:
        for isa in ISAS:
            for num_threads in (1, 2):
                monkeypatch.setenv(ISA_VARIABLE, isa)
                found.append((isa, num_threads, NativeLinear(packed)))
        by_tiles = [sums_by_tiles(kind, isa) for isa, _, _ in found]
        truths = {tiles: found[by_tiles.index(tiles)][2](x_TI) for tiles in set(by_tiles)}
        assert relative(truths[by_tiles[0]], truths[by_tiles[-1]]) < 2e-6
        for tiles, (isa, num_threads, linear) in zip(by_tiles, found, strict=True):
            torch.set_num_threads(num_threads)
            for first, end in ((0, 131), (0, 1), (5, 6), (5, 7), (3, 19), (130, 131)):
                rows = slice(first, end)
                found_TO = linear(x_TI[rows])
                assert torch.equal(found_TO, truths[tiles][rows]), (isa, num_threads, rows)
            back_TO = linear(x_TI.flip(0).contiguous()).flip(0)
            assert torch.equal(back_TO, truths[tiles]), (isa, num_threads)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from(["int4", "int8", "bf16", "fp32"]),
    st.integers(1, 70),
    st.integers(1, 300),
    st.integers(0, 40),
    st.sampled_from(ISAS),
)
def test_row_does_not_depend_on_its_batch(
    kind: str, num_out: int, num_in: int, num_rows: int, isa: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ISA_VARIABLE, isa)
        linear = NativeLinear(of_kind(kind, num_out, num_in), torch.randn(num_out))
    x_TI = torch.randn(num_rows, num_in)
    y_TO = linear(x_TI)
    assert y_TO.shape == (num_rows, num_out) and y_TO.isfinite().all()
    for row in range(0, num_rows, 7):
        assert torch.equal(linear(x_TI[row : row + 1])[0], y_TO[row])


@pytest.mark.parametrize("isa", ISAS)
def test_long_row_does_not_depend_on_its_batch(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many of them pass by some inputs at a time, and results wait in between."""
    monkeypatch.setenv(ISA_VARIABLE, isa)
    weight_OI, x_TI = torch.randn(39, 4500).bfloat16(), torch.randn(100, 4500)
    linear, _ = in_both_widths(weight_OI)
    y_TO = linear(x_TI)
    assert relative(y_TO, x_TI.double() @ weight_OI.double().T) < 2e-6
    for row in range(0, 100, 9):
        assert torch.equal(linear(x_TI[row : row + 1])[0], y_TO[row])


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_rows_quantised_in_advance_give_the_same_products(kind: str) -> None:
    linear = NativeLinear(of_kind(kind, 33, 200))
    x_TI = torch.randn(6, 200)
    rows = quantise_rows(x_TI, kind, linear.group)
    assert rows.num_rows == 6 and rows.group == linear.group
    assert torch.equal(linear.multiply_quantised(rows), linear(x_TI))
    other = quantise_rows(x_TI, kind, 96)
    with pytest.raises(ValueError, match="another num_in or group"):
        linear.multiply_quantised(other)


def test_rows_quantised_for_another_kind_are_refused() -> None:
    linear, x_TI = NativeLinear(of_kind("int4", 33, 200)), torch.randn(6, 200)
    with pytest.raises(ValueError, match="another kind of weight"):
        linear.multiply_quantised(quantise_rows(x_TI, "int8_groups", linear.group))
    with pytest.raises(ValueError, match="only int8 takes rows of one scale"):
        linear(x_TI, row_scale=0.1)


@pytest.mark.parametrize("kind", ["int4", "int8", "bf16", "fp32"])
def test_weight_rows_serve_as_an_embedding_table(kind: str) -> None:
    packed = of_kind(kind, 50, 70)
    linear, ids = NativeLinear(packed), torch.tensor([0, 49, 7, 7])
    dense_OI = linear.rows(torch.arange(50))
    assert torch.equal(linear.rows(ids), dense_OI[ids])
    assert relative(linear(torch.eye(70)).T, dense_OI) < 1e-6
    with pytest.raises(ValueError, match="no such row"):
        linear.rows(torch.tensor([50]))


def in_both_widths(weight_OI: torch.Tensor) -> tuple[NativeLinear, NativeLinear]:
    """A weight that bfloat16 holds, stored as that and as float32."""
    shape = tuple(weight_OI.shape)
    return (
        NativeLinear(Packed("bf16", *shape, 0, pack_lines("bf16", weight_OI, 0))),
        NativeLinear(Packed("fp32", *shape, 0, pack_lines("fp32", weight_OI.float(), 0))),
    )


@pytest.mark.parametrize("isa", ISAS)
def test_bfloat16_and_float32_weights_give_the_same_products(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits, but by tiles, whose order of sums is another one: which shows them in use."""
    monkeypatch.setenv(ISA_VARIABLE, isa)
    weight_OI, x_TI = torch.randn(33, 700).bfloat16(), torch.randn(9, 700)
    bf16, fp32 = (linear(x_TI) for linear in in_both_widths(weight_OI))
    assert torch.equal(bf16, fp32) == (isa != TILES)
    exact = x_TI.double() @ weight_OI.double().T
    assert relative(bf16, exact) <= relative(fp32, exact)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_rows", [1, 40, 200])
def test_products_with_bfloat16_weights_do_not_round_rows(
    num_rows: int, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every bit of a number is preserved, from the smallest to the largest; NaN and
    infinite stays so, and stays in its row."""
    monkeypatch.setenv(ISA_VARIABLE, isa)
    x_TI = torch.randn(num_rows, 64) * 10.0 ** torch.randint(-30, 38, (num_rows, 64))
    x_TI[0, :3] = torch.tensor([3.4028235e38, -3.4e38, 1e-30])
    bf16, _ = in_both_widths(torch.eye(64).bfloat16())
    assert torch.equal(bf16(x_TI), x_TI)
    x_TI[0, 5], x_TI[0, 7] = float("inf"), float("nan")
    ones, wide = in_both_widths(torch.eye(64)[5:8].bfloat16().abs() + 1)
    rows_TO, wide_TO = ones(x_TI.clamp(-1e30, 1e30)), wide(x_TI.clamp(-1e30, 1e30))
    assert torch.equal(rows_TO[0].isnan(), wide_TO[0].isnan()) and rows_TO[1:].isfinite().all()
    x_TI[0, 7] = 1.0
    assert torch.equal(ones(x_TI)[0], torch.full((3,), torch.inf))


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("value", [1.0, -1.0, 1e-20, 1e20, 0.0])
def test_extreme_constant_weights_are_exact(value: float, zeros: bool) -> None:
    weights = quantise(torch.full((20, 200), value), 64, zeros=zeros)
    assert relative(weights.dense(64), torch.full((20, 200), value)) < 1e-3 or value == 0
    y_TO = native(weights, 64)(torch.ones(2, 200))
    assert torch.allclose(y_TO, torch.full((2, 20), 200 * value), rtol=1e-3, atol=0)


def test_rounding_error_is_near_theory_and_zero_points_reduce_it() -> None:
    weight_OI = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    plain = {
        g: relative(quantise(weight_OI, g, zeros=False).dense(g), weight_OI) for g in (32, 128)
    }
    zeros = {g: relative(quantise(weight_OI, g, zeros=True).dense(g), weight_OI) for g in (32, 128)}
    naive = (weight_OI / (weight_OI.abs().amax(1, keepdim=True) / 7)).round()
    assert 0.06 < plain[32] < plain[128] < 0.1
    assert zeros[32] < plain[32] and zeros[128] < plain[128]
    assert plain[128] < 0.7 * relative(naive * weight_OI.abs().amax(1, keepdim=True) / 7, weight_OI)


def test_formats_it_cannot_compute_are_refused() -> None:
    weight_OI = torch.randn(8, 64)

    def build(format: Format) -> None:
        spec = LinearSpec(num_out=8, num_in=64, format=format)
        build_linear(spec, weight_OI, None, CPU, torch.float32)

    with pytest.raises(CannotRun, match="groups of 32, 64 or 128"):
        build(int4(16))
    with pytest.raises(CannotRun, match="would round"):
        build(BF16)


def test_unavailable_isa_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"avx2", "avxvnni", "avx512", "avx512vnni", "avx512pairs", "avx512amx"} - set(ISAS)
    for isa, message in [("avx1024", "unknown ISA"), *((isa, "lacks") for isa in sorted(missing))]:
        monkeypatch.setenv(ISA_VARIABLE, isa)
        with pytest.raises(ValueError, match=message):
            NativeLinear(of_kind("int4", 4, 40))(torch.ones(1, 40))


@pytest.mark.parametrize(
    "broken",
    [
        {"num_bytes": 1},
        {"num_scales": 3},
        {"num_factors": 1},
        {"group": 48},
        {"num_out": 0},
        {"lines": 8},
        {"scales": 0},
        {"span": 64},
        {"steps": 64},
        {"min_steps": 64},
        {"mins": 64, "zeros": 64},
    ],
)
def test_buffers_of_the_wrong_size_are_refused(broken: dict[str, int]) -> None:
    packed = of_kind("int4", 16, 64)
    assert packed.scales is not None and packed.factors is not None
    fields = {
        "kind": "int4",
        "num_out": 16,
        "num_in": 64,
        "group": 32,
        "lines": packed.lines.data_ptr(),
        "num_bytes": packed.lines.nbytes,
        "scales": packed.scales.data_ptr(),
        "num_scales": packed.scales.numel(),
        "zeros": 0,
        "factors": packed.factors.data_ptr(),
        "num_factors": packed.factors.numel(),
        "bias": 0,
        "num_bias": 0,
        "mins": 0,
        "steps": 0,
        "min_steps": 0,
        "span": 0,
    }
    _native.LinearWeight(**fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        _native.LinearWeight(**fields | broken)  # type: ignore[arg-type]


@pytest.mark.parametrize("isa", ISAS)
def test_rows_quantised_for_another_isa_are_refused(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x_TI, linear = torch.randn(3, 256), NativeLinear(of_kind("int8", 16, 256))
    monkeypatch.setenv(ISA_VARIABLE, isa)
    rows = quantise_rows(x_TI, "int8", linear.group)
    if ("avx512amx" in ISAS) == (isa == "avx512amx"):
        assert torch.equal(linear.multiply_quantised(rows), linear(x_TI))
        return
    with pytest.raises(ValueError, match="another variant"):
        linear.multiply_quantised(rows)
