"""Products of a few rows with quantised weights in Triton, bound by the read of the weights.

What. y = x Wᵀ for the rows of a decode step. A program takes 64 outputs and a part of the inputs.
Weights are the left operand, so that 64 outputs fill a wgmma whose other side is as narrow as the
batch (16 columns at least); they are widened in registers, so that only codes travel. The inputs
are divided (split-K) until all multiprocessors have work. The program that finishes an output last
adds the parts, in their order, so that no second launch and no atomic sum is needed.

INT4 weights (`pack_int4`) are widened without integer conversions, whose rate would be the bound:
the bits 0x4300 | q are the bfloat16 number 128 + q (0x6400 | q the float16 number 1024 + q), and
zero-points enter as sums of activations. Scales of groups of 64 or more multiply the float32 sums;
those of smaller groups multiply the weights.

Source. Weight-only kernels: Frantar et al. 2024 (Marlin, arXiv:2408.11743); split-K for skinny
products: Hoque et al. 2024 (arXiv:2402.00025).

Invariant. Weights are those of `Int4Weights.dense` and of q · scale, but for one rounding to the
rows' dtype in groups below 64; sums are float32. For given shapes the order of summation is fixed.

When it loses. Above some 64 rows the product is bound by arithmetic, and torch's own products are
better: `torch._int_mm` and `torch._scaled_mm` (cuBLASLt) come nearer to the peak of the tensor
cores, with scales per row and output; weights of 4 bits are dequantised for cuBLAS.

Shape legend: T rows, I inputs, O outputs, G groups.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.engine.kernels.triton.nvfp4 import GROUP as NVFP4_GROUP
from ridgeline.engine.kernels.triton.nvfp4 import fold_nvfp4
from ridgeline.engine.kernels.triton.tiles import card_of, padded

PLAIN, INT4, NVFP4 = tl.constexpr(0), tl.constexpr(4), tl.constexpr(5)
MOST_ROWS, FLOAT32_ROWS = 64, 16
"""Rows of one program; a step of more rows reads the weights again for each 64. Those of float32
are multiplied outside the tensor cores, with both operands in registers."""
OUTPUTS = 64
INPUTS = 128
"""Inputs of a step, and of a block of packed nibbles."""


ALWAYS_ASM = False
"""Whether the instructions of a GPU are also used on the CPU: to compile for one that is absent."""


class Scales(NamedTuple):
    """Those of outputs or of groups, zero-points of groups (NVFP4: the scale of the tensor), and
    those of rows."""

    of_outputs: Tensor | None = None
    zeros: Tensor | None = None
    of_rows: Tensor | None = None


class SkinnyTile(NamedTuple):
    """`rows` of the batch and `inputs` at a time, for `outputs`; `splits` of all inputs."""

    rows: int
    inputs: int
    splits: int
    num_warps: int = 4
    num_stages: int = 5
    outputs: int = OUTPUTS


@triton.jit
def _widen_packed(packed, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """(low nibbles - 8, high nibbles - 8) of bytes, exactly, in `DTYPE`.

    With `ASM`, four bytes at a time: their nibbles become the low bits of 16-bit numbers of a known
    exponent, from which a fused multiply-add takes the rest; 1.5 instructions per weight.
    """
    if ASM and tl.bfloat16 == DTYPE:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, one, offset;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            mov.b32 one, 0x3F803F80;
            mov.b32 offset, 0xC308C308;
            lop3.b32 $0, a, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $1, b, 0x000F000F, 0x43004300, 0xEA;
            shr.u32 a, a, 4;
            shr.u32 b, b, 4;
            lop3.b32 $2, a, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $3, b, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, $0, one, offset;
            fma.rn.bf16x2 $1, $1, one, offset;
            fma.rn.bf16x2 $2, $2, one, offset;
            fma.rn.bf16x2 $3, $3, one, offset;
            }
            """,
            "=&r,=&r,=&r,=&r,r",
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    elif ASM and tl.float16 == DTYPE:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, offset;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            mov.b32 offset, 0xE408E408;
            lop3.b32 $0, a, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 $1, b, 0x000F000F, 0x64006400, 0xEA;
            shr.u32 a, a, 4;
            shr.u32 b, b, 4;
            lop3.b32 $2, a, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 $3, b, 0x000F000F, 0x64006400, 0xEA;
            add.rn.f16x2 $0, $0, offset;
            add.rn.f16x2 $1, $1, offset;
            add.rn.f16x2 $2, $2, offset;
            add.rn.f16x2 $3, $3, offset;
            }
            """,
            "=&r,=&r,=&r,=&r,r",
            [packed],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        low = ((packed & 0xF).to(tl.int8) - 8).to(DTYPE)
        high = ((packed >> 4).to(tl.int8) - 8).to(DTYPE)
    return low, high


@triton.jit
def fold_plain(
    acc, x_at, w, o, o_seen, t_seen, k, num_in, w_stride,
    BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + w x of the inputs k .. k + BK - 1; codes keep their scale for the end."""
    i = k + tl.arange(0, BK)
    x = tl.load(x_at + i[None, :], mask=t_seen[:, None] & (i < num_in)[None, :], other=0.0)
    w_at = w + (o * w_stride)[:, None] + i[None, :]
    codes = tl.load(w_at, mask=o_seen[:, None] & (i < num_in)[None, :], other=0.0).to(x.dtype)
    return tl.dot(codes, tl.trans(x), acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def _fold_half(
    acc, w, x_at, scale, zero, o, o_seen, t_seen, k, num_in, num_groups,
    GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + w x of the inputs k .. k + HALF - 1, with w = nibbles - 8."""
    i = k + tl.arange(0, HALF)
    x = tl.load(x_at + i[None, :], mask=t_seen[:, None] & (i < num_in)[None, :], other=0.0)
    if GROUP >= HALF:  # one group: its scale multiplies the sum
        at = o * num_groups + tl.minimum(k // GROUP, num_groups - 1)
        s = tl.load(scale + at, mask=o_seen, other=0.0).to(tl.float32)
        part = tl.dot(w, tl.trans(x), input_precision=PRECISION)
        if HAS_ZERO:  # sums of (8 - zero) x
            z = 8.0 - tl.load(zero + at, mask=o_seen, other=0).to(tl.float32)
            part += z[:, None] * tl.sum(x.to(tl.float32), 1)[None, :]
        acc += part * s[:, None]
    else:
        at = (o * num_groups)[:, None] + tl.minimum(i // GROUP, num_groups - 1)[None, :]
        s = tl.load(scale + at, mask=o_seen[:, None], other=0.0).to(x.dtype)
        if HAS_ZERO:
            z = 8.0 - tl.load(zero + at, mask=o_seen[:, None], other=0).to(tl.float32)
            w = w + z.to(x.dtype)
        acc = tl.dot(w * s, tl.trans(x), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _fold_int4(
    acc, x_at, w, scale, zero, o, o_seen, t_seen, k, num_in, w_stride, num_groups,
    GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, BK: tl.constexpr, ASM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + w x of the inputs k .. k + BK - 1, the second half of each 128 in the high nibbles."""
    HALF: tl.constexpr = BK // 2
    j = k // 2 + tl.arange(0, HALF)
    packed = tl.load(w + (o * w_stride)[:, None] + j[None, :], mask=o_seen[:, None], other=0)
    low, high = _widen_packed(packed, x_at.dtype.element_ty, ASM)
    acc = _fold_half(
        acc, low, x_at, scale, zero, o, o_seen, t_seen, k, num_in, num_groups,
        GROUP, HAS_ZERO, HALF, PRECISION,
    )  # fmt: skip
    return _fold_half(
        acc, high, x_at, scale, zero, o, o_seen, t_seen, k + HALF, num_in, num_groups,
        GROUP, HAS_ZERO, HALF, PRECISION,
    )  # fmt: skip


@triton.jit
def _group_of(scale, zero, o, o_seen, group, num_groups, HAS_ZERO: tl.constexpr):
    """(scales, 8 - zero-points) of one group of every output."""
    at = o * num_groups + tl.minimum(group, num_groups - 1)
    s = tl.load(scale + at, mask=o_seen, other=0.0).to(tl.float32)
    z = tl.zeros_like(s)
    if HAS_ZERO:
        z = 8.0 - tl.load(zero + at, mask=o_seen, other=0).to(tl.float32)
    return s, z


@triton.jit
def _fold_wide_groups(
    acc, x_at, w, scale, zero, o, o_seen, t_seen, first, end, num_in, w_stride, num_groups,
    GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, BK: tl.constexpr, ASM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + w x of the inputs first .. end - 1, in steps of inputs that share a group.

    The scales of the next step are read a step ahead: Triton pipelines the operands of products
    alone, and a step would wait for the memory.
    """
    HALF: tl.constexpr = BK // 2
    s, z = _group_of(scale, zero, o, o_seen, first // GROUP, num_groups, HAS_ZERO)
    for k in range(first, end, BK):
        next_group = (k + BK) // GROUP
        next_s, next_z = _group_of(scale, zero, o, o_seen, next_group, num_groups, HAS_ZERO)
        i, j = k + tl.arange(0, HALF), k // 2 + tl.arange(0, HALF)
        low_seen = t_seen[:, None] & (i < num_in)[None, :]
        high_seen = t_seen[:, None] & (i + HALF < num_in)[None, :]
        x_low = tl.load(x_at + i[None, :], mask=low_seen, other=0.0)
        x_high = tl.load(x_at + HALF + i[None, :], mask=high_seen, other=0.0)
        packed = tl.load(w + (o * w_stride)[:, None] + j[None, :], mask=o_seen[:, None], other=0)
        low, high = _widen_packed(packed, x_low.dtype, ASM)
        part = tl.dot(low, tl.trans(x_low), input_precision=PRECISION)
        part = tl.dot(high, tl.trans(x_high), part, input_precision=PRECISION)
        if HAS_ZERO:  # sums of (8 - zero) x
            sums = tl.sum(x_low.to(tl.float32), 1) + tl.sum(x_high.to(tl.float32), 1)
            part += z[:, None] * sums[None, :]
        acc += part * s[:, None]
        s, z = next_s, next_z
    return acc


@triton.jit
def _add_parts(acc, partial, counter, split, tile, SPLITS: tl.constexpr, SIZE: tl.constexpr, at):
    """(sum of all parts of this tile in their order, whether this program was the last)."""
    tl.store(partial + (tile * SPLITS + split) * SIZE + at, acc)
    tl.debug_barrier()  # all parts of this program are written before it says so
    is_last = tl.atomic_add(counter + tile, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        tl.store(counter + tile, 0)  # for the next launch
        acc = tl.zeros_like(acc)
        for part in range(SPLITS):
            part_at = partial + (tile * SPLITS + part) * SIZE + at
            acc += tl.load(part_at, cache_modifier=".cg")
    return acc, is_last


@triton.jit
def _multiply(
    x, w, scale, zero, row_scale, bias, out, partial, counter, num_rows, num_out, num_in,
    x_stride, w_stride,
    num_groups,
    KIND: tl.constexpr, GROUP: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_ZERO: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, INTEGER: tl.constexpr,
    ASM: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """N outputs of M rows, over one part of the inputs."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    t = tl.program_id(2) * M + tl.arange(0, M)
    t_seen = t < num_rows
    o = (tile * N + tl.arange(0, N)).to(tl.int64)
    o_seen = o < num_out
    x_at = x + (t.to(tl.int64) * x_stride)[:, None]
    blocks = tl.cdiv(tl.cdiv(num_in, BK), SPLITS)
    first = split * blocks * BK
    end = tl.minimum(first + blocks * BK, num_in)
    acc = tl.zeros([N, M], tl.int32 if INTEGER else tl.float32)
    if KIND == 4 and GROUP >= BK:
        acc = _fold_wide_groups(
            acc, x_at, w, scale, zero, o, o_seen, t_seen, first, end, num_in, w_stride, num_groups,
            GROUP, HAS_ZERO, BK, ASM, PRECISION,
        )  # fmt: skip
    elif KIND == 4:
        for k in range(first, end, BK):
            acc = _fold_int4(
                acc, x_at, w, scale, zero, o, o_seen, t_seen, k, num_in, w_stride, num_groups,
                GROUP, HAS_ZERO, BK, ASM, PRECISION,
            )  # fmt: skip
    elif KIND == 5:
        for k in range(first, end, BK):
            acc = fold_nvfp4(
                acc, x_at, w, scale, o, o_seen, t_seen, k, num_in, w_stride, num_groups,
                BK, PRECISION,
            )  # fmt: skip
    else:
        for k in range(first, end, BK):
            acc = fold_plain(acc, x_at, w, o, o_seen, t_seen, k, num_in, w_stride, BK, PRECISION)
    is_last = True
    if SPLITS > 1:
        at = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
        own = tile + tl.program_id(2) * tl.num_programs(0)
        acc, is_last = _add_parts(acc, partial, counter, split, own, SPLITS, N * M, at)
    if is_last:
        y = acc.to(tl.float32)
        if KIND == 5:  # the scale of the tensor
            y = y * tl.load(zero)
        if HAS_SCALE:
            y = y * tl.load(scale + o, mask=o_seen, other=0.0).to(tl.float32)[:, None]
        if HAS_ROW_SCALE:
            y = y * tl.load(row_scale + t, mask=t_seen, other=0.0)[None, :]
        if HAS_BIAS:
            y += tl.load(bias + o, mask=o_seen, other=0.0).to(tl.float32)[:, None]
        out_at = out + (t.to(tl.int64) * num_out)[None, :] + o[:, None]
        tl.store(out_at, y.to(out.dtype.element_ty), mask=o_seen[:, None] & t_seen[None, :])


def w16a16(
    x_TI: Tensor, w_OI: Tensor, bias_O: Tensor | None = None, tile: SkinnyTile | None = None
) -> Tensor:
    """x Wᵀ (+ bias) with weights of a float dtype, rounded to that of the rows."""
    return _launch(x_TI, w_OI, Scales(), bias_O, 0, tile)


def w8a16(
    x_TI: Tensor,
    q_OI: Tensor,
    scale_O: Tensor,
    bias_O: Tensor | None = None,
    tile: SkinnyTile | None = None,
) -> Tensor:
    """x (q · scale)ᵀ (+ bias) with q in int8 or float8_e4m3fn and rows in a float dtype."""
    return _launch(x_TI, q_OI, Scales(scale_O), bias_O, 0, tile)


def pack_int4(q_OI: Tensor) -> Tensor:
    """Bytes [O, J] of nibbles (uint8, 0..15): 64 bytes for each 128 inputs.

    Byte j of such a block holds its input j in the low nibble and its input 64 + j in the high one,
    so that each half of the activations is read as it lies. Missing inputs are zeros.
    """
    q_OI = torch.nn.functional.pad(q_OI, (0, -q_OI.shape[1] % INPUTS))
    halves_OB2J = q_OI.reshape(len(q_OI), -1, 2, INPUTS // 2)
    return (halves_OB2J[:, :, 0] | (halves_OB2J[:, :, 1] << 4)).flatten(1)


def unpack_int4(packed_OJ: Tensor, num_in: int) -> Tensor:
    """The nibbles q_OI of `pack_int4`."""
    halves_OBJ = packed_OJ.view(len(packed_OJ), -1, INPUTS // 2)
    return torch.stack((halves_OBJ & 15, halves_OBJ >> 4), 2).flatten(1)[:, :num_in]


def w4a16(
    x_TI: Tensor,
    packed_OJ: Tensor,
    scale_OG: Tensor,
    zero_OG: Tensor | None,
    *,
    group_size: int,
    bias_O: Tensor | None = None,
    tile: SkinnyTile | None = None,
) -> Tensor:
    """x Wᵀ (+ bias) with W = (q - zero) · scale, in the layout of `pack_int4`; `zero_OG` None: 8.

    Groups have `group_size` consecutive inputs: 32, 64, or a multiple of 128.
    """
    assert group_size in (32, 64) or group_size % 128 == 0, group_size
    assert scale_OG.is_contiguous() and (zero_OG is None or zero_OG.is_contiguous())
    return _launch(x_TI, packed_OJ, Scales(scale_OG, zero_OG), bias_O, group_size, tile)


def w4a16_nvfp4(
    x_TI: Tensor,
    packed_OJ: Tensor,
    scale_OG: Tensor,
    global_1: Tensor,
    bias_O: Tensor | None = None,
    tile: SkinnyTile | None = None,
) -> Tensor:
    """x Wᵀ (+ bias) with W = e2m1 · scale · global, codes in the layout of `pack_int4`.

    Each 16 inputs share a scale in float8_e4m3fn; `global_1` is one float32 number.
    """
    assert scale_OG.is_contiguous() and scale_OG.shape[1] == -(-x_TI.shape[1] // NVFP4_GROUP)
    scales = Scales(scale_OG.view(torch.uint8), global_1)
    return _launch(x_TI, packed_OJ, scales, bias_O, NVFP4_GROUP.value, tile, kind=NVFP4)


def w8a8(
    q_TI: Tensor,
    scale_T1: Tensor,
    q_OI: Tensor,
    scale_O: Tensor,
    bias_O: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
    tile: SkinnyTile | None = None,
) -> Tensor:
    """(q_x · scale_x)(q_w · scale_w)ᵀ (+ bias) of codes of one kind, int8 or float8_e4m3fn.

    Sums of int8 are exact, in int32; those of FP8 are float32.
    """
    assert q_TI.dtype == q_OI.dtype and scale_T1.numel() == len(q_TI)
    scales = Scales(scale_O, None, scale_T1)
    return _launch(q_TI, q_OI, scales, bias_O, 0, tile, out_dtype)


def skinny_tile(
    num_rows: int, num_out: int, num_in: int, bits: int, dtype: torch.dtype, device: torch.device
) -> SkinnyTile:
    """The fastest of benchmarks/gpu/sweep_tiles.py on an H200, by the bits of a weight.

    `dtype` is that of the rows.

    INT4 is bound by the instructions that widen it, and wants six programs per multiprocessor and
    few stages; 8 bits and more are bound by the memory, and four programs suffice. More rows make
    the parts that splits write larger, and weights of 16 bits are read for longer.
    """
    rows = min(FLOAT32_ROWS if dtype == torch.float32 else MOST_ROWS, padded(num_rows))
    num_tiles = -(-num_out // OUTPUTS) * -(-num_rows // rows)
    processors = card_of(device).num_processors
    wanted = -(-6 * processors // num_tiles) if bits == 4 else 4 * processors // num_tiles
    most = 2 if bits == 16 else 8 if rows == 16 else 4
    steps = -(-num_in // INPUTS)
    splits = max(1, min(wanted, most, steps // 4))
    stages = 3 if bits == 4 and rows == 16 else 5 if bits == 8 and rows == 16 else 4
    return SkinnyTile(rows, INPUTS, splits, num_stages=stages)


def _launch(
    x_TI: Tensor,
    w_OJ: Tensor,
    scales: Scales,
    bias_O: Tensor | None,
    group_size: int,
    tile: SkinnyTile | None,
    dtype: torch.dtype | None = None,
    kind: tl.constexpr | None = None,
) -> Tensor:
    (num_rows, num_in), num_out = x_TI.shape, len(w_OJ)
    assert x_TI.stride(1) == 1 and w_OJ.stride(1) == 1
    columns = triton.cdiv(num_in, INPUTS) * INPUTS // 2 if group_size else num_in
    assert w_OJ.shape[1] == columns, (x_TI.shape, w_OJ.shape)
    out_TO = torch.empty((num_rows, num_out), dtype=dtype or x_TI.dtype, device=x_TI.device)
    if num_rows == 0:
        return out_TO
    bits = 4 if group_size else min(16, 8 * w_OJ.dtype.itemsize)
    tile = tile or skinny_tile(num_rows, num_out, num_in, bits, x_TI.dtype, x_TI.device)
    grid = (triton.cdiv(num_out, tile.outputs), tile.splits, triton.cdiv(num_rows, tile.rows))
    num_parts = grid[0] * grid[1] * grid[2] if tile.splits > 1 else 0
    size = (num_parts, tile.outputs * tile.rows)
    is_integer = x_TI.dtype == torch.int8
    sums = torch.int32 if is_integer else torch.float32
    partial = torch.empty(size, dtype=sums, device=x_TI.device)
    scale, zero, row_scale = scales
    _multiply[grid](
        *(x_TI, w_OJ, scale, zero, row_scale, bias_O, out_TO, partial, _counters(x_TI.device)),
        *(num_rows, num_out, num_in, x_TI.stride(0), w_OJ.stride(0)),
        -(-num_in // group_size) if group_size else 0,
        KIND=(kind or (INT4 if group_size else PLAIN)).value,
        GROUP=group_size,
        HAS_SCALE=scale is not None and not group_size,
        HAS_ZERO=zero is not None and kind is None,
        HAS_ROW_SCALE=row_scale is not None,
        INTEGER=is_integer,
        ASM=x_TI.device.type == "cuda" or ALWAYS_ASM,
        HAS_BIAS=bias_O is not None,
        M=tile.rows,
        N=tile.outputs,
        BK=tile.inputs,
        SPLITS=tile.splits,
        PRECISION="ieee" if x_TI.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out_TO


@cache
def _counters(device: torch.device) -> Tensor:
    """Finished parts of every output tile, zero between launches: launches of one stream only."""
    return torch.zeros(16384, dtype=torch.int32, device=device)
