"""Rotary embedding and the store of keys and values into the paged cache, in one launch.

What. A program takes some heads of one token: it rotates those of queries and keys in place and
writes keys and values, encoded in the cache's format, to their slot. Without fusion that is a
dozen launches per layer.

Invariants. The rotation is x·cos + swap(x)·sin in float32, rounded once; keys are encoded from the
rounded numbers, so the cache holds what a later read of `qkv` would store. A thread reads only the
numbers that it overwrites, so rotating in place is safe.

Shape legend: T tokens, H query heads, K key heads, X = H + 2K, D head_dim, R rotated dimensions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.engine.kernels.triton.elementwise import (
    FP8_CODES,
    INT8_CODES,
    NO_CODES,
    encode,
    row_scale,
)
from ridgeline.engine.kernels.triton.tiles import scale_view

HEADS_PER_PROGRAM = 8
CODES_OF = {torch.float8_e4m3fn: FP8_CODES.value, torch.int8: INT8_CODES.value}


@triton.jit
def _store_part(x, kv, at, scale, mask, CODES: tl.constexpr, SCALED: tl.constexpr):
    """Store a part of rows, encoded."""
    if CODES == NO_CODES:
        tl.store(kv + at, x.to(kv.dtype.element_ty), mask=mask)
    else:
        units = x / scale[:, None] if SCALED else x
        tl.store(kv + at, encode(units, CODES), mask=mask)


@triton.jit
def _rope_store(
    qkv, cos, sin, kv, scales, slots, qkv_stride, table_stride,
    H: tl.constexpr, K: tl.constexpr, B: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
    CODES: tl.constexpr,
    SCALED: tl.constexpr, ROTATES: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = B * (D + 4) if SCALED else B * D
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, HALF)
    low, high = i, i + R // 2
    if INTERLEAVED:
        low, high = 2 * i, 2 * i + 1
    is_head = head < H + 2 * K
    in_half = is_head[:, None] & (i < R // 2)[None, :]
    row_at = qkv + token * qkv_stride + head * D
    x1_at, x2_at = row_at[:, None] + low[None, :], row_at[:, None] + high[None, :]
    x1 = tl.load(x1_at, mask=in_half, other=0.0)
    x2 = tl.load(x2_at, mask=in_half, other=0.0)
    if ROTATES:
        c = tl.load(cos + token * table_stride + i, mask=i < R // 2, other=0.0).to(tl.float32)
        s_at = sin + token * table_stride + R // 2 + i  # the first half is negated
        s = tl.load(s_at, mask=i < R // 2, other=0.0).to(tl.float32)
        turns = (head < H + K)[:, None]
        c = tl.where(turns, c[None, :], 1.0)
        s = tl.where(turns, s[None, :], 0.0)
        wide1, wide2 = x1.to(tl.float32), x2.to(tl.float32)
        x1 = (wide1 * c - wide2 * s).to(qkv.dtype.element_ty)
        x2 = (wide2 * c + wide1 * s).to(qkv.dtype.element_ty)
        tl.store(x1_at, x1, mask=in_half & turns)
        tl.store(x2_at, x2, mask=in_half & turns)
    slot = tl.load(slots + token).to(tl.int64)
    is_stored = is_head & (head >= H) & (slot >= 0)
    slot = tl.maximum(slot, 0)
    tile = slot // B * BLOCK + (head - H) * TILE
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    scale = tl.full([HEADS], 1.0, tl.float32)
    at = tile + slot % B * D
    rest = R + tl.arange(0, REST)
    in_rest = is_stored[:, None] & (rest < D)[None, :]
    x3 = tl.zeros([HEADS, REST], tl.float32)
    if R < D:
        x3 = tl.load(row_at[:, None] + rest[None, :], mask=in_rest, other=0.0).to(tl.float32)
    if SCALED:
        top = tl.maximum(tl.max(tl.abs(x1), 1), tl.max(tl.abs(x2), 1))
        scale = row_scale(tl.maximum(top, tl.max(tl.abs(x3), 1)), CODES)
        scale_at = scales + tile // 4 + B * D // 4 + slot % B
        tl.store(scale_at, scale, mask=is_stored)
    in_half = in_half & is_stored[:, None]
    _store_part(x1, kv, at[:, None] + low[None, :], scale, in_half, CODES, SCALED)
    _store_part(x2, kv, at[:, None] + high[None, :], scale, in_half, CODES, SCALED)
    if R < D:
        _store_part(x3, kv, at[:, None] + rest[None, :], scale, in_rest, CODES, SCALED)


def rope_store(
    qkv_TXD: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    kv_N2KBW: Tensor,
    slots_T: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    interleaved: bool = False,
) -> None:
    """Rotate the queries and keys of `qkv_TXD` in place, and store its keys and values.

    `cos_TR` and `sin_TR` are rows of `RopeTables`: the first half of sin is negated. `slots_T`
    holds block · B + offset of each row, or -1 for a row that is not stored. `interleaved` rotates
    dimensions 2i and 2i + 1 in place of i and i + R/2.
    """
    assert qkv_TXD.shape[1] == num_heads + 2 * num_kv_heads
    assert cos_TR.stride() == sin_TR.stride() and cos_TR.stride(-1) == 1
    _launch(qkv_TXD, kv_N2KBW, slots_T, num_heads, (cos_TR, sin_TR), interleaved)


def store_kv(kv_T2KD: Tensor, kv_N2KBW: Tensor, slots_T: Tensor) -> None:
    """Store keys and values as they are."""
    assert kv_T2KD.stride(1) == kv_T2KD.shape[2] * kv_T2KD.stride(2)
    _launch(kv_T2KD.flatten(1, 2), kv_N2KBW, slots_T, 0, None, False)


def _launch(
    qkv_TXD: Tensor,
    kv_N2KBW: Tensor,
    slots_T: Tensor,
    num_heads: int,
    rotation: tuple[Tensor, Tensor] | None,
    interleaved: bool,
) -> None:
    num_tokens, num_all, head_dim = qkv_TXD.shape
    _, _, num_kv_heads, block_size, width = kv_N2KBW.shape
    assert kv_N2KBW[0].is_contiguous() and qkv_TXD.stride()[1:] == (head_dim, 1)
    rotated = head_dim if rotation is None else rotation[0].shape[-1]
    assert rotated % 2 == 0 and num_all == num_heads + 2 * num_kv_heads
    if num_tokens == 0:
        return
    codes = CODES_OF.get(kv_N2KBW.dtype, NO_CODES.value)
    cos, sin = (None, None) if rotation is None else rotation
    _rope_store[(num_tokens, triton.cdiv(num_all, HEADS_PER_PROGRAM))](
        *(qkv_TXD, cos, sin, kv_N2KBW, scale_view(kv_N2KBW, head_dim), slots_T),
        *(qkv_TXD.stride(0), 0 if cos is None else cos.stride(0)),
        H=num_heads,
        K=num_kv_heads,
        B=block_size,
        D=head_dim,
        R=rotated,
        BLOCK=kv_N2KBW.stride(0),
        HALF=triton.next_power_of_2(rotated // 2),
        REST=triton.next_power_of_2(max(1, head_dim - rotated)),
        HEADS=HEADS_PER_PROGRAM,
        CODES=codes,
        SCALED=width != head_dim,
        ROTATES=rotation is not None,
        INTERLEAVED=interleaved,
        num_warps=4 if head_dim > 64 else 2,
    )
