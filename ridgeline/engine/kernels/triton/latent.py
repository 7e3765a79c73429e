"""Decode over latent rows (multi-head latent attention, absorbed form) in Triton.

What. All query heads attend to one shared row per token: its latent, which is key and value at
once, and a rotated part, which is key alone. A program takes up to 64 heads of one sequence and
reads every row once for both roles. Contexts are split as in `paged_decode`.

Paper. DeepSeek-V2 (arXiv:2405.04434), appendix C; FlashMLA reads the cache the same way.

Invariants. Those of `paged_decode`. The cache kv_N11BW holds plain numbers or FP8 without scales.

When it loses. Heads beyond 64 read the rows again, through the L2 cache.

Shape legend: S sequences, H query heads, R rank of the latent, X rotated part, W = R + X,
N blocks, B block size, M columns of the block tables.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.engine.kernels.triton.attention import LOG2E, combine
from ridgeline.engine.kernels.triton.tiles import Card, card_of, num_splits, padded

MOST_HEADS = 64
KEYS = 32
"""Rows of 576 numbers at a time: 36 KiB in bfloat16, two stages of which leave room for results."""
FLOAT32_TILE = (16, 16)
"""Heads and rows at a time in float32, whose products keep their operands in registers."""


def tile_of_heads(num_heads: int, width: int, dtype: torch.dtype, card: Card) -> tuple[int, int]:
    """Heads of a program and rows of the cache at a time, as many as fit in its shared memory."""
    if dtype == torch.float32:
        return FLOAT32_TILE
    heads = min(MOST_HEADS, padded(num_heads))
    while heads > 16 and (heads + KEYS) * width * dtype.itemsize > card.shared_bytes:
        heads //= 2
    return heads, KEYS


@triton.jit
def _attend_latent(
    q_ptr, kv, tables, lens, out, partial, partial_ml, q_stride, table_stride, qk_scale,
    H: tl.constexpr, B: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, X: tl.constexpr,
    XP: tl.constexpr, SPLITS: tl.constexpr, M: tl.constexpr, L: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """M heads of one sequence over one part of its context."""
    seq = tl.program_id(0)
    split = tl.program_id(2)
    head = tl.program_id(1) * M + tl.arange(0, M)
    own = head < H
    r, x = tl.arange(0, RP), tl.arange(0, XP)
    q_at = q_ptr + (seq.to(tl.int64) * q_stride + head * (R + X))[:, None]
    q_latent = tl.load(q_at + r[None, :], mask=own[:, None] & (r < R)[None, :], other=0.0)
    q_rotated = tl.load(q_at + R + x[None, :], mask=own[:, None] & (x < X)[None, :], other=0.0)
    high = tl.load(lens + seq)
    part = tl.cdiv(tl.cdiv(high, SPLITS), L) * L
    low = split * part
    high = tl.minimum(high, low + part)
    m = tl.full([M], float("-inf"), tl.float32)
    mass = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, RP], tl.float32)
    for at in range(low, high, L):
        keys = at + tl.arange(0, L)
        seen = keys < high
        block = tl.load(tables + seq * table_stride + keys // B, mask=seen, other=0).to(tl.int64)
        row_at = kv + ((block * B + keys % B) * (R + X))[:, None]
        latent = tl.load(row_at + r[None, :], mask=seen[:, None] & (r < R)[None, :], other=0.0)
        is_rotated = seen[:, None] & (x < X)[None, :]
        rotated = tl.load(row_at + R + x[None, :], mask=is_rotated, other=0.0)
        latent, rotated = latent.to(q_latent.dtype), rotated.to(q_latent.dtype)
        scores = tl.dot(q_latent, tl.trans(latent), input_precision=PRECISION)
        scores = tl.dot(q_rotated, tl.trans(rotated), scores, input_precision=PRECISION)
        scores = tl.where(seen[None, :], scores * qk_scale, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp2(scores - m_new[:, None])
        shrink = tl.exp2(m - m_new)
        mass = mass * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(latent.dtype), latent, acc, input_precision=PRECISION)
        m = m_new
    row = seq.to(tl.int64) * H + head
    if SPLITS == 1:
        o = acc / tl.where(mass == 0, 1.0, mass)[:, None]
        is_element = own[:, None] & (r < R)[None, :]
        out_at = out + (row * R)[:, None] + r[None, :]
        tl.store(out_at, o.to(out.dtype.element_ty), mask=is_element)
    else:
        place = row * SPLITS + split
        tl.store(partial_ml + place * 2, m, mask=own)
        tl.store(partial_ml + place * 2 + 1, mass, mask=own)
        if (low < high) | (split == 0):
            tl.store(partial + place[:, None] * RP + r[None, :], acc, mask=own[:, None])


def latent_decode(
    q_SHW: Tensor,
    kv_N11BW: Tensor,
    block_tables_SM: Tensor,
    context_lens_S: Tensor,
    *,
    rank: int,
    scale: float,
    max_context: int,
    splits: int | None = None,
) -> Tensor:
    """o_SHR of one absorbed query per sequence, to be multiplied with the value projections.

    A context of length 0 is a padded row and gives zeros. `max_context` bounds the lengths.
    """
    (num_seqs, num_heads, width), block_size = q_SHW.shape, kv_N11BW.shape[3]
    assert kv_N11BW.shape[1:3] == (1, 1) and kv_N11BW.shape[4] == width and width > rank
    assert kv_N11BW.is_contiguous() and q_SHW.stride()[1:] == (width, 1)
    out = torch.empty((num_seqs, num_heads, rank), dtype=q_SHW.dtype, device=q_SHW.device)
    if num_seqs == 0:
        return out
    rows, keys = tile_of_heads(num_heads, width, q_SHW.dtype, card_of(q_SHW.device))
    tiles, columns = triton.cdiv(num_heads, rows), padded(rank)
    splits = splits or num_splits(num_seqs * tiles, max_context, q_SHW.device)
    num_partial = num_seqs * num_heads * splits if splits > 1 else 1
    partial = torch.empty((num_partial, columns), dtype=torch.float32, device=q_SHW.device)
    partial_ml = torch.empty((num_partial, 2), dtype=torch.float32, device=q_SHW.device)
    _attend_latent[(num_seqs, tiles, splits)](
        *(q_SHW, kv_N11BW, block_tables_SM, context_lens_S, out, partial, partial_ml),
        *(q_SHW.stride(0), block_tables_SM.stride(0), scale * LOG2E.value),
        H=num_heads,
        B=block_size,
        R=rank,
        RP=columns,
        X=width - rank,
        XP=padded(width - rank),
        SPLITS=splits,
        M=rows,
        L=keys,
        PRECISION="ieee" if q_SHW.dtype == torch.float32 else "tf32",
        num_warps=4 if rows == 16 else 8,
        num_stages=2,
    )
    if splits > 1:
        combine[(num_seqs, num_heads)](
            *(partial, partial_ml, out, out.stride(0)),
            H=num_heads,
            D=rank,
            DP=columns,
            SPLITS=splits,
            num_warps=8,
        )
    return out
