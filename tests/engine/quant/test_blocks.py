"""GGUF's blocks in the packed kernels: the file's own weights bit for bit, on every ISA."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

import ridgeline._native as _native
from ridgeline.engine.checkpoints.gguf.decode_blocks import decode_blocks
from ridgeline.engine.checkpoints.gguf.pack_blocks import READERS, packed_blocks
from ridgeline.engine.kernels.native_linear import (
    ISA_VARIABLE,
    NativeLinear,
    Packed,
    concatenate_outputs,
    quantise_rows,
)
from ridgeline.engine.quant.blocks import Blocks, merge_blocks, pack, round_to
from ridgeline.engine.quant.grid import Grid, refusal
from ridgeline.engine.quant.grid import pack as pack_grid
from ridgeline.engine.quant.int4.reference import MOST
from ridgeline.modelspec.checkpoints.gguf_header import TYPES
from ridgeline.modelspec.checkpoints.gguf_spec import computed_format
from ridgeline.modelspec.format import blocks, format_for

ISAS = _native.linear_isas().split(",")
BYTES = {name: (numbers, nbytes) for name, numbers, nbytes in TYPES.values()}
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q4_K": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q5_K": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
}
"""Where a type's fp16 numbers stand in a block."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def raw(kind: str, num_out: int, num_in: int) -> np.ndarray:
    """Random bytes, each block's fp16 numbers of a size that weights have."""
    numbers, nbytes = BYTES[kind]
    count = num_out * num_in // numbers
    found = torch.randint(0, 256, (count, nbytes), dtype=torch.uint8).numpy()
    for at in HALVES[kind]:
        half = (torch.randn(count, 1) * 2.0 ** torch.randint(-14, -6, (count, 1))).half()
        found[:, at : at + 2] = half.numpy().view(np.uint8)
    return found


def made(kind: str, num_out: int, num_in: int) -> tuple[Blocks, torch.Tensor]:
    bytes_ = raw(kind, num_out, num_in)
    truth = torch.from_numpy(decode_blocks(kind, bytes_)).view(num_out, num_in)
    return packed_blocks(kind, bytes_, num_out), truth


def rounded(x_TI: torch.Tensor, linear: NativeLinear) -> torch.Tensor:
    """The rows as the kernels see them: 8 bits, a scale per row and group."""
    group, most = linear.group, MOST if linear.packed.kind == "int4" else 127
    parts = torch.nn.functional.pad(x_TI, (0, -x_TI.shape[1] % group)).view(len(x_TI), -1, group)
    top = parts.abs().amax(2, keepdim=True).clamp(min=1e-30)
    back = (parts * (torch.full_like(top, most) / top)).round().double() * (top / most).double()
    return back.view(len(x_TI), -1)[:, : x_TI.shape[1]]


def on(isa: str, packed: Packed, bias_O: torch.Tensor | None = None) -> NativeLinear:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ISA_VARIABLE, isa)
        return NativeLinear(packed, bias_O)


def test_every_packed_type_is_tested() -> None:
    assert set(HALVES) == set(READERS) == {k for k in BYTES if computed_format(k).kind == "blocks"}


@pytest.mark.parametrize("kind", READERS)
def test_packed_weights_equal_the_file_bit_for_bit(kind: str) -> None:
    weight, truth = made(kind, 37, 512)
    assert torch.equal(weight.dense(), truth)
    packed = pack(weight)
    assert torch.equal(NativeLinear(packed).rows(torch.arange(37)), truth)
    assert packed.nbytes == pytest.approx(weight.format.nbytes(48, 512) + 4 * 48)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", READERS)
def test_products_equal_those_of_the_rounded_rows(kind: str, isa: str) -> None:
    weight, truth = made(kind, 50, 768)
    linear = on(isa, pack(weight))
    low_OI = weight.lows()
    parts_OI = (truth - low_OI).abs() + low_OI.abs()  # what is really added up
    for num_rows in (1, 3, 5, 20, 130):
        x_TI = torch.randn(num_rows, 768) * torch.logspace(-3, 3, num_rows).unsqueeze(1)
        exact = rounded(x_TI, linear) @ truth.double().T
        added = rounded(x_TI, linear).abs() @ parts_OI.double().T
        assert ((linear(x_TI) - exact).abs() <= 1e-6 * added + 1e-30).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "Q8_0", "Q6_K", "Q2_K", "Q5_K"])
def test_the_same_bits_on_every_isa_in_any_batch_and_on_any_threads(kind: str) -> None:
    weight, _ = made(kind, 2050, 512)
    x_TI, bias_O = torch.randn(131, 512), torch.randn(2050)
    x_TI[5] *= 1e4
    truth_TO = on(ISAS[0], pack(weight), bias_O)(x_TI)
    before = torch.get_num_threads()
    try:
        for isa in ISAS:
            linear = on(isa, pack(weight), bias_O)
            for num_threads in (1, 2):
                torch.set_num_threads(num_threads)
                for rows in (slice(None), slice(0, 1), slice(5, 7), slice(3, 19), slice(130, 131)):
                    assert torch.equal(linear(x_TI[rows]), truth_TO[rows]), (isa, rows)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("group", [16, 32, 128])
@pytest.mark.parametrize("isa", ISAS)
def test_sums_are_exact_at_the_largest_products(isa: str, group: int) -> None:
    q_OI = torch.where(torch.rand(48, 512) < 0.5, -128, 127).to(torch.int8)
    q_OI[:16] = -128
    one_OG = torch.ones(48, 512 // group, dtype=torch.float16)
    linear = on(isa, pack(Blocks(blocks(8, group), q_OI, one_OG)))
    x_TI = torch.where(torch.rand(9, 512) < 0.5, -127.0, 127.0)
    x_TI[0] = 127
    assert torch.equal(linear(x_TI).double(), x_TI.double() @ q_OI.double().T)


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_rows_quantised_in_advance_give_the_same_products(kind: str) -> None:
    linear, x_TI = NativeLinear(pack(made(kind, 33, 256)[0])), torch.randn(6, 256)
    assert linear.group == (16 if kind == "Q6_K" else 32)
    rows = quantise_rows(x_TI, linear.packed.kind, linear.group)
    assert torch.equal(linear.multiply_quantised(rows), linear(x_TI))


def test_types_computed_together_keep_their_weights() -> None:
    """As q, k and v of Q4_K_M: one layout that holds each type, bit for bit."""
    for first, second in pairwise([*READERS, "Q8_0", "Q4_0", "Q6_K", "Q4_1"]):
        (one, one_truth), (two, two_truth) = made(first, 32, 512), made(second, 20, 512)
        whole = merge_blocks([one, two])
        truth = torch.cat([one_truth, two_truth])
        assert torch.equal(whole.dense(), truth), (first, second)
        assert torch.equal(NativeLinear(pack(whole)).rows(torch.arange(52)), truth)
    same = merge_blocks([made("Q4_K", 16, 256)[0], made("Q4_K", 16, 256)[0]])
    assert same.format == computed_format("Q4_K")


def test_concatenated_weights_unpack_to_their_rows() -> None:
    weight, truth = made("Q4_K", 48, 256)
    parts = [weight.rows(lambda table, i=i: table.split(16)[i].contiguous()) for i in range(3)]  # type: ignore[misc]
    pieces = [pack(part) for part in parts]
    assert torch.equal(NativeLinear(concatenate_outputs(pieces)).rows(torch.arange(48)), truth)


@pytest.mark.parametrize(("bits", "group"), [(8, 128), (8, 16), (8, 96), (5, 32), (6, 256)])
def test_symmetric_codes_of_more_than_four_bits_are_exact(bits: int, group: int) -> None:
    """GPTQ's and compressed-tensors' 8 bits in groups."""
    q_OI = torch.randint(0, 2**bits, (40, 768), dtype=torch.uint8)
    scale_OG = (torch.rand(40, 768 // group) * 0.01 + 1e-4).half().float()
    grid = Grid(q_OI, scale_OG, None, bits, group)
    assert refusal(grid) is None
    assert torch.equal(NativeLinear(pack_grid(grid)).rows(torch.arange(40)), grid.dense())
    assert format_for(bits, group, 768, False) == blocks(8, min(group, 128) if group != 96 else 32)
    assert format_for(bits, group, 768, True).kind == "dense"


def test_scales_of_any_range_are_kept() -> None:
    """fp16 scales further apart than a factor per row could bring together."""
    q_OI = torch.randint(0, 16, (16, 64), dtype=torch.uint8)
    scale_OG = torch.tensor([[1.0, 2.0**-24]]).expand(16, 2).contiguous()
    grid = Grid(q_OI, scale_OG, None, 4, 32)
    assert torch.equal(NativeLinear(pack_grid(grid)).rows(torch.arange(16)), grid.dense())


def test_rounding_to_blocks_is_half_a_step_off_at_most() -> None:
    weight_OI = torch.randn(7, 100)
    found = round_to(weight_OI, 32)
    step_OI = found.scale_OS.float().repeat_interleave(32, 1)[:, :100]
    back_OI = NativeLinear(pack(found)).rows(torch.arange(7))
    assert ((back_OI - weight_OI).abs() <= 0.502 * step_OI).all()


def test_misshapen_tables_are_refused() -> None:
    packed = pack(made("Q4_K", 16, 512)[0])
    for span in (0, 32, 100):
        with pytest.raises((ValueError, AssertionError)):
            NativeLinear(Packed(**{**fields(packed), "span": span}))
    with pytest.raises(AssertionError):
        NativeLinear(Packed(**{**fields(packed), "steps": packed.steps[:, :8]}))  # type: ignore[index]


def fields(packed: Packed) -> dict[str, object]:
    return {name: getattr(packed, name) for name in Packed.__slots__}
