"""Paged attention in Triton: decode, prefill and mixed steps read keys where the cache holds them.

What. One kernel. A program computes a tile of query rows of one sequence against one key head. The
rows of a tile are query positions times the G query heads that share the key head (grouped-query
attention), so that every key is read once for all of them and the product has the 16 rows that
tensor cores need. Scores exist only in registers; the softmax is computed online. In `paged_decode`
the context of a sequence is divided among several programs, whose partial results a second kernel
combines; in `paged_prefill` a sequence has as many tiles as its new tokens fill.

Papers. PagedAttention (Kwon et al. 2023, arXiv:2309.06180); FlashAttention-2 (Dao 2023,
arXiv:2307.08691); Flash-Decoding (Dao et al. 2023) for the division of contexts.

Invariants. Those of `ridgeline.engine.attention.base`. A result depends on the sequence alone, but
for rounding: the number of splits depends on the shapes of the launch, never on lengths, so that a
launch can be captured in a CUDA graph.

Formats of the cache kv_N2KBW, of which each block is contiguous:

    float32, float16, bfloat16   W = D      numbers
    float8_e4m3fn                W = D      numbers, unscaled
    float8_e4m3fn, int8          W = D + 4  a tile is B · D codes, then B float32 scales of its
                                            rows; x = code · scale

Shape legend: T query rows, S sequences, H query heads, K key heads, G = H/K, D head_dim, N blocks,
B block size, M columns of the block tables.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.engine.kernels.triton.tiles import (
    AttentionTile,
    card_of,
    num_splits,
    padded,
    scale_view,
    tile_for_decode,
    tile_for_prefill,
)

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_rows(kv, tile, offset, seen, D: tl.constexpr, DP: tl.constexpr):
    """Codes [L, DP] of keys or values: row `offset` of the tiles at `tile`, zeros if not `seen`."""
    d = tl.arange(0, DP)
    at = kv + (tile + offset * D)[:, None] + d[None, :]
    mask = seen[:, None]
    if DP != D:
        mask = mask & (d < D)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _mask_scores(scores, keys, positions, seen, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Scores with minus infinity where the query at `positions` does not see the key."""
    visible = seen[None, :] & (keys[None, :] <= positions[:, None])
    if WINDOW > 0:
        visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
    if CHUNK > 0:
        visible = visible & (keys[None, :] >= positions[:, None] // CHUNK * CHUNK)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _fold(
    q, m, mass, acc, positions, at, end, table_row, kv, scales, head,
    qk_scale, softcap,
    K: tl.constexpr, B: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, SCALED: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    CAPPED: tl.constexpr, MASKED: tl.constexpr, L: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A step of the online softmax: the keys from `at` on, L of them, those below `end`.

    Scores are exponents of two. `m` is the largest score so far, `mass` the sum of the weights.
    """
    keys = at + tl.arange(0, L)
    seen = keys < end
    block = tl.load(table_row + keys // B, mask=seen, other=0).to(tl.int64)
    offset = keys % B
    k_tile = block * BLOCK + head * TILE
    v_tile = k_tile + K * TILE
    k = _load_rows(kv, k_tile, offset, seen, D, DP)
    v = _load_rows(kv, v_tile, offset, seen, D, DP)
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
    if SCALED:
        k_scale = tl.load(scales + k_tile // 4 + (B * D // 4) + offset, mask=seen, other=0)
        scores = scores * k_scale[None, :]
    scores = scores * qk_scale
    if CAPPED:  # c · tanh(s / c)
        scores = 1 - 2 / (tl.exp2(scores * (2 * LOG2E / softcap)) + 1)
        scores = scores * (softcap * LOG2E)
    if MASKED:
        scores = _mask_scores(scores, keys, positions, seen, WINDOW, CHUNK)
    m_new = tl.maximum(m, tl.max(scores, 1))
    base = m_new
    if MASKED:  # minus infinity in rows that have seen no key yet
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(m - base)
    mass = mass * shrink + tl.sum(p, 1)
    if SCALED:
        v_scale = tl.load(scales + v_tile // 4 + (B * D // 4) + offset, mask=seen, other=0)
        p = p * v_scale[None, :]
    acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision=PRECISION)
    return m_new, mass, acc


@triton.jit
def tile_of(index, starts, num_seqs, TOKENS: tl.constexpr):
    """(sequence, first local query) of tile `index`; a sequence owns one tile more than it fills.

    Sequence s begins at tile starts[s] // TOKENS + s, which rises with s.
    """
    low = index * 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // TOKENS + middle <= index:
            low = middle
        else:
            high = middle
    return low, (index - (tl.load(starts + low) // TOKENS + low)) * TOKENS


@triton.jit
def _attend(
    q_ptr, kv, scales, tables, starts, lens, sinks, out, partial, partial_ml,
    num_seqs, q_stride, table_stride, out_stride, qk_scale, softcap,
    K: tl.constexpr, G: tl.constexpr, B: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, SCALED: tl.constexpr, DECODE: tl.constexpr, SPLITS: tl.constexpr,
    M: tl.constexpr, L: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """M query rows of one sequence and one key head over one part of its context."""
    TOKENS: tl.constexpr = 1 if DECODE else M // G
    TILE: tl.constexpr = B * (D + 4) if SCALED else B * D
    head = tl.program_id(1)
    split = tl.program_id(2)
    if DECODE:
        seq = tl.program_id(0)
        first = 0
        row = seq
        num_new = 1
    else:
        seq, first = tile_of(tl.program_id(0), starts, num_seqs, TOKENS)
        row = tl.load(starts + seq)
        num_new = tl.load(starts + seq + 1) - row
    if first >= num_new:
        return
    length = tl.load(lens + seq)
    m_at = tl.arange(0, M)
    token = first + m_at // G
    own = (m_at < TOKENS * G) & (token < num_new)
    first_position = length - num_new + first
    positions = length - num_new + token
    q_head = head * G + m_at % G
    d = tl.arange(0, DP)
    row_of = (row + token).to(tl.int64)
    is_element = own[:, None] & (d < D)[None, :]
    q_at = q_ptr + (row_of * q_stride + q_head * D)[:, None] + d[None, :]
    q = tl.load(q_at, mask=is_element, other=0.0)

    low = 0
    if WINDOW > 0:
        low = tl.maximum(first_position - WINDOW + 1, 0)
    if CHUNK > 0:
        low = tl.maximum(first_position, 0) // CHUNK * CHUNK
    high = tl.minimum(length, first_position + TOKENS)
    if SPLITS > 1:
        part = tl.cdiv(tl.cdiv(high - low, SPLITS), L) * L
        low += split * part
        high = tl.minimum(high, low + part)
    m = tl.full([M], float("-inf"), tl.float32)
    mass = tl.zeros([M], tl.float32)
    if SINKS:  # a key that every query sees, without a value
        sink = tl.load(sinks + q_head, mask=own, other=0.0).to(tl.float32) * LOG2E
        m = tl.where(split == 0, sink, m)
        mass = tl.where(split == 0, mass + 1, mass)
    acc = tl.zeros([M, DP], tl.float32)
    table_row = tables + seq * table_stride
    masked_from = low
    if not DECODE and WINDOW == 0 and CHUNK == 0:  # the keys that every query of the tile sees
        masked_from = low + tl.maximum(tl.minimum(first_position + 1, high) - low, 0) // L * L
        for at in range(low, masked_from, L):
            m, mass, acc = _fold(
                q, m, mass, acc, positions, at, high, table_row, kv, scales, head,
                qk_scale, softcap,
                K, B, D, DP, TILE, BLOCK, SCALED, WINDOW, CHUNK, CAPPED, False, L, PRECISION,
            )  # fmt: skip
    for at in range(masked_from, high, L):
        m, mass, acc = _fold(
            q, m, mass, acc, positions, at, high, table_row, kv, scales, head,
            qk_scale, softcap,
            K, B, D, DP, TILE, BLOCK, SCALED, WINDOW, CHUNK, CAPPED, True, L, PRECISION,
        )  # fmt: skip

    if SPLITS == 1:
        o = acc / tl.where(mass == 0, 1.0, mass)[:, None]
        out_at = out + (row_of * out_stride + q_head * D)[:, None] + d[None, :]
        tl.store(out_at, o.to(out.dtype.element_ty), mask=is_element)
    else:
        place = (row_of * (K * G) + q_head) * SPLITS + split
        tl.store(partial_ml + place * 2, m, mask=own)
        tl.store(partial_ml + place * 2 + 1, mass, mask=own)
        if (low < high) | (split == 0):
            tl.store(partial + place[:, None] * DP + d[None, :], acc, mask=own[:, None])


@triton.jit
def combine(
    partial, partial_ml, out, out_stride,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The result of one query row and head from its parts; parts without weight are not read."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, DP)
    place = (row * H + head) * SPLITS + split
    m = tl.load(partial_ml + place * 2)
    sums = tl.load(partial_ml + place * 2 + 1)
    top = tl.max(m, 0)
    weight = tl.exp2(m - tl.where(top == float("-inf"), 0.0, top))
    mass = tl.sum(sums * weight, 0)
    was_written = (sums > 0) | (split == 0)
    acc = tl.load(partial + place[:, None] * DP + d[None, :], mask=was_written[:, None], other=0.0)
    o = tl.sum(acc * weight[:, None], 0) / tl.where(mass == 0, 1.0, mass)
    tl.store(out + row * out_stride + head * D + d, o.to(out.dtype.element_ty), mask=d < D)


def paged_decode(
    q_SHD: Tensor,
    kv_N2KBW: Tensor,
    block_tables_SM: Tensor,
    context_lens_S: Tensor,
    *,
    scale: float,
    max_context: int,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    out: Tensor | None = None,
    tile: AttentionTile | None = None,
    splits: int | None = None,
) -> Tensor:
    """o_SHD of one query per sequence, the last of its `context_lens_S` keys (int32).

    A context of length 0 is a padded row and gives zeros. `max_context` bounds the lengths and with
    S and K chooses the number of splits; `tile` and `splits` override the choice. Heads and
    dimensions of `q_SHD` must be contiguous, its rows may be strided.
    """
    shape = _Shape.of(q_SHD, kv_N2KBW)
    kv_itemsize, card = kv_N2KBW.dtype.itemsize, card_of(q_SHD.device)
    tile = tile or tile_for_decode(shape.group, shape.head_dim, q_SHD.dtype, kv_itemsize, card)
    num_seqs = len(context_lens_S)
    splits = splits or num_splits(num_seqs * shape.num_kv_heads, max_context, q_SHD.device)
    out = _result(q_SHD, out)
    if num_seqs == 0:
        return out
    head_dim, width = shape.head_dim, padded(shape.head_dim)
    num_partial = q_SHD.shape[0] * q_SHD.shape[1] * splits if splits > 1 else 1
    partial = torch.empty((num_partial, width), dtype=torch.float32, device=q_SHD.device)
    partial_ml = torch.empty((num_partial, 2), dtype=torch.float32, device=q_SHD.device)
    _attend[(num_seqs, shape.num_kv_heads, splits)](
        *(q_SHD, kv_N2KBW, scale_view(kv_N2KBW, head_dim), block_tables_SM, None),
        *(context_lens_S, sinks_H, out, partial, partial_ml, num_seqs),
        **_arguments(shape, q_SHD, block_tables_SM, out, scale, softcap),
        **_masks(window, chunk, sinks_H),
        **_tile_arguments(tile, decode=True, splits=splits),
    )
    if splits > 1:
        combine[(num_seqs, q_SHD.shape[1])](
            *(partial, partial_ml, out, out.stride(0)),
            H=q_SHD.shape[1],
            D=head_dim,
            DP=width,
            SPLITS=splits,
        )
    return out


def paged_prefill(
    q_THD: Tensor,
    kv_N2KBW: Tensor,
    block_tables_SM: Tensor,
    query_starts_S1: Tensor,
    context_lens_S: Tensor,
    *,
    scale: float,
    max_queries: int,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    out: Tensor | None = None,
    tile: AttentionTile | None = None,
) -> Tensor:
    """o_THD of the new tokens of every sequence, whose keys and values the cache already holds.

    Sequence s has the rows query_starts[s] .. query_starts[s + 1] - 1 (int32) at the end of its
    context of `context_lens_S` keys. Rows after query_starts[S] are not written. `max_queries`
    bounds the new tokens of a sequence and chooses the tile, which `tile` overrides.
    """
    shape = _Shape.of(q_THD, kv_N2KBW)
    sizes = (shape.group, shape.head_dim, max_queries)
    kv_itemsize, card = kv_N2KBW.dtype.itemsize, card_of(q_THD.device)
    tile = tile or tile_for_prefill(*sizes, q_THD.dtype, kv_itemsize, card)
    num_seqs = len(context_lens_S)
    out = _result(q_THD, out)
    if num_seqs == 0 or len(q_THD) == 0:
        return out
    num_tiles = len(q_THD) // (tile.rows // shape.group) + num_seqs
    _attend[(num_tiles, shape.num_kv_heads, 1)](
        *(q_THD, kv_N2KBW, scale_view(kv_N2KBW, shape.head_dim), block_tables_SM, query_starts_S1),
        *(context_lens_S, sinks_H, out, None, None, num_seqs),
        **_arguments(shape, q_THD, block_tables_SM, out, scale, softcap),
        **_masks(window, chunk, sinks_H),
        **_tile_arguments(tile, decode=False, splits=1),
    )
    return out


class _Shape(NamedTuple):
    num_kv_heads: int
    group: int
    block_size: int
    head_dim: int
    block_stride: int
    is_scaled: bool

    @staticmethod
    def of(q_THD: Tensor, kv_N2KBW: Tensor) -> _Shape:
        _, num_heads, head_dim = q_THD.shape
        _, sides, num_kv_heads, block_size, width = kv_N2KBW.shape
        assert sides == 2 and num_heads % num_kv_heads == 0 and kv_N2KBW[0].is_contiguous()
        assert q_THD.stride(2) == 1 and q_THD.stride(1) == head_dim, q_THD.stride()
        group = num_heads // num_kv_heads
        scaled, stride = width != head_dim, kv_N2KBW.stride(0)
        return _Shape(num_kv_heads, group, block_size, head_dim, stride, scaled)


def _result(q_THD: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    assert out.shape == q_THD.shape and out.stride(1) == q_THD.shape[2] and out.stride(2) == 1
    return out


def _arguments(
    shape: _Shape, q: Tensor, tables: Tensor, out: Tensor, scale: float, softcap: float | None
) -> dict[str, object]:
    assert tables.stride(1) == 1
    return {
        "q_stride": q.stride(0),
        "table_stride": tables.stride(0),
        "out_stride": out.stride(0),
        "qk_scale": scale * (LOG2E.value if softcap is None else 1.0),
        "softcap": softcap or 0.0,
        "K": shape.num_kv_heads,
        "G": shape.group,
        "B": shape.block_size,
        "D": shape.head_dim,
        "DP": padded(shape.head_dim),
        "BLOCK": shape.block_stride,
        "CAPPED": softcap is not None,
        "SCALED": shape.is_scaled,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }


def _masks(window: int | None, chunk: int | None, sinks_H: Tensor | None) -> dict[str, object]:
    return {"WINDOW": window or 0, "CHUNK": chunk or 0, "SINKS": sinks_H is not None}


def _tile_arguments(tile: AttentionTile, decode: bool, splits: int) -> dict[str, object]:
    return {
        "DECODE": decode,
        "SPLITS": splits,
        "M": tile.rows,
        "L": tile.keys,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
