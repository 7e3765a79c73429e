"""Storage formats of keys and values: one row [W] per (token, head), and the layout of tiles.

A tile is one block of one head, for keys or for values.

    float32, bfloat16, float16   row = D numbers                             W = D
    int8                         row = D codes + 128, then one float32 scale W = D + 4 bytes
    fp8                          row = D codes, then one float32 scale       W = D + 4 bytes

INT8 stores each key and each value of a head with a separate scale: x ≈ code · scale, with
scale = max|x| / 127 over the D numbers of that token and head, and code = x / scale rounded half to
even. Codes are stored plus 128 as unsigned bytes, which widen to words by a mask and a shift, while
signed ones need shuffles. FP8 stores E4M3 numbers (4 bits of exponent, 3 of mantissa) of the same
rows, scaled so that the largest is 448, the format's largest: small numbers keep 3 bits where INT8
keeps few, large ones have 3 where INT8 has 7.

Rows of floats are contiguous. Tiles of codes have the order in which the native kernel multiplies
them, so that it need not transpose them (that took a third of its time, docs/concepts/kernels.md):

    keys     [D/4, B, 4]   four dimensions of every token side by side
    values   [B/4, D, 4]   four tokens (0 2 1 3) of every dimension side by side

The remainder modulo four follows ([B, D%4], [D, B%4]), then B scales. On a GPU (`in_rows`) tiles
are [B, D] codes, then B scales, and INT8 codes are signed, as the Triton kernels read them. A tile
is as large as its rows, and whatever moves blocks (copy-on-write, prefix sharing) moves their
scales too.

Paper. Per-token quantisation of the KV cache as in KVQuant (Hooper et al. 2024, arXiv 2401.18079)
and KIVI (Liu et al. 2024, arXiv 2402.02750), at 8 bits, where keys need no channel-wise scales.
E4M3: Micikevicius et al. 2022, arXiv 2209.05433.

Invariants. The bytes of a position depend on that token's key or value alone; writing it again
gives the same bytes; `to_tiles` only moves bytes, and `from_tiles` moves them back. Lossy, except
where the format is the dtype of the computation.

When it loses. In quality if keys have strong outliers, and in time for prompts with the torch
backend, which widens rows before use (benchmarks/bench_attention.py has the figures).

Shape legend: X, Y any axes, D head_dim, W numbers of a stored row, N blocks, K key heads, B tokens
of a block, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from ridgeline.engine.dtype import DTYPES

SCALE_BYTES = 4
MAX_CODE = 127
OFFSET = 128  # added to codes as stored
MAX_E4M3 = 448
SMALLEST = 1e-30  # rows below it are stored as zeros, because 448 / max|x| must stay finite


class KvFormat(Protocol):
    """Encodes (token, head) rows and arranges them in tiles."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def width(self, head_dim: int) -> int:
        """Numbers of `dtype` in a stored row."""
        ...

    def encode(self, x_XD: Tensor) -> Tensor:
        """stored_XW of keys or values."""
        ...

    def decode(self, stored_XW: Tensor, dtype: torch.dtype) -> Tensor:
        """x_XD in `dtype`."""
        ...

    def to_tiles(self, rows_X2YBW: Tensor) -> Tensor:
        """Rearrange rows into the layout of tiles: the same shape, keys before values."""
        ...

    def from_tiles(self, tiles_X2YBW: Tensor) -> Tensor:
        """The rows of tiles, the inverse of `to_tiles`."""
        ...

    def write(self, kv_N2KBW: Tensor, slots_R: Tensor, rows_RW: Tensor) -> None:
        """Write rows to slots; slot = ((block·2 + value)·K + head)·B + token."""
        ...


@dataclass(frozen=True)
class PlainKv:
    """Unquantised numbers of a float dtype."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def width(self, head_dim: int) -> int:
        return head_dim

    def encode(self, x_XD: Tensor) -> Tensor:
        return x_XD.to(self.dtype)

    def decode(self, stored_XW: Tensor, dtype: torch.dtype) -> Tensor:
        return stored_XW.to(dtype)

    def to_tiles(self, rows_X2YBW: Tensor) -> Tensor:
        return rows_X2YBW

    def from_tiles(self, tiles_X2YBW: Tensor) -> Tensor:
        return tiles_X2YBW

    def write(self, kv_N2KBW: Tensor, slots_R: Tensor, rows_RW: Tensor) -> None:
        if kv_N2KBW.is_contiguous():
            kv_N2KBW.view(-1, kv_N2KBW.shape[-1]).index_copy_(0, slots_R, rows_RW)
            return
        size = kv_N2KBW.shape[3]
        kv_N2KBW[(*tile_index(kv_N2KBW, slots_R // size), slots_R % size)] = rows_RW


@dataclass(frozen=True)
class CodedKv:
    """Codes of one byte with one float32 scale per token and head.

    `in_rows`: tiles hold the rows of codes one after another, INT8 without its offset.
    """

    name: str = "int8"
    dtype: torch.dtype = torch.int8
    max_code: int = MAX_CODE
    in_rows: bool = False
    layouts: dict[tuple[int, int], Tensor] = field(default_factory=dict, compare=False, repr=False)

    def width(self, head_dim: int) -> int:
        return head_dim + SCALE_BYTES

    def encode(self, x_XD: Tensor) -> Tensor:
        x_XD = x_XD.float()
        top_X1 = x_XD.abs().amax(dim=-1, keepdim=True)
        # Divide tensor by tensor: torch computes scalar / tensor as a reciprocal and a product,
        # which rounds twice.
        inverse_X1 = torch.where(top_X1 > SMALLEST, top_X1.new_tensor(self.max_code) / top_X1, 0.0)
        codes_XD = self._to_codes(x_XD * inverse_X1)
        return torch.cat([codes_XD, (top_X1 / self.max_code).view(torch.int8)], dim=-1)

    def decode(self, stored_XW: Tensor, dtype: torch.dtype) -> Tensor:
        codes_XD = self._from_codes(stored_XW[..., :-SCALE_BYTES])
        scale_X1 = stored_XW[..., -SCALE_BYTES:].contiguous().view(torch.float32)
        return (codes_XD * scale_X1).to(dtype)

    def to_tiles(self, rows_X2YBW: Tensor) -> Tensor:
        offsets_2P = self._offsets(rows_X2YBW)
        flat_X2YP, out = rows_X2YBW.flatten(-2), torch.empty_like(rows_X2YBW).flatten(-2)
        for side, offsets_P in enumerate(offsets_2P):
            out.select(-3, side)[..., offsets_P] = flat_X2YP.select(-3, side)
        return out.view(rows_X2YBW.shape)

    def from_tiles(self, tiles_X2YBW: Tensor) -> Tensor:
        flat_X2YP = tiles_X2YBW.flatten(-2)
        sides = [
            flat_X2YP.select(-3, side).index_select(-1, offsets_P)
            for side, offsets_P in enumerate(self._offsets(tiles_X2YBW))
        ]
        return torch.stack(sides, dim=-3).view(tiles_X2YBW.shape)

    def write(self, kv_N2KBW: Tensor, slots_R: Tensor, rows_RW: Tensor) -> None:
        num_heads, block_size, width = kv_N2KBW.shape[2:]
        offsets_2BW = self._offsets(kv_N2KBW).view(2, block_size, width)
        tiles_R, tokens_R = slots_R // block_size, slots_R % block_size
        at_RW = offsets_2BW[tiles_R // num_heads % 2, tokens_R]
        if kv_N2KBW.is_contiguous():
            at_RW = at_RW + (tiles_R * (block_size * width)).unsqueeze(1)
            kv_N2KBW.view(-1).index_copy_(0, at_RW.flatten(), rows_RW.flatten())
            return
        places = (index_R.unsqueeze(1) for index_R in tile_index(kv_N2KBW, tiles_R))
        kv_N2KBW[(*places, at_RW // width, at_RW % width)] = rows_RW

    def _to_codes(self, x_XD: Tensor) -> Tensor:
        """codes_XD as bytes, of numbers up to `max_code` in magnitude."""
        codes_XD = x_XD.round()
        if self.in_rows:
            return codes_XD.to(torch.int8)
        return codes_XD.add_(OFFSET).to(torch.uint8).view(torch.int8)

    def _from_codes(self, codes_XD: Tensor) -> Tensor:
        """The numbers of codes, in float32."""
        if self.in_rows:
            return codes_XD.float()
        return codes_XD.view(torch.uint8).float().sub_(OFFSET)

    def _offsets(self, tiles_X2YBW: Tensor) -> Tensor:
        block_size, width = tiles_X2YBW.shape[-2:]
        if (block_size, width) not in self.layouts:
            order = row_offsets if self.in_rows else code_offsets
            offsets_2P = order(block_size, width - SCALE_BYTES).to(tiles_X2YBW.device)
            self.layouts[block_size, width] = offsets_2P
        return self.layouts[block_size, width]


class Int8Kv(CodedKv):
    """Integers of 8 bits."""


@dataclass(frozen=True)
class Fp8Kv(CodedKv):
    """E4M3 numbers."""

    name: str = "fp8"
    max_code: int = MAX_E4M3

    def _to_codes(self, x_XD: Tensor) -> Tensor:
        return x_XD.to(torch.float8_e4m3fn).view(torch.int8)

    def _from_codes(self, codes_XD: Tensor) -> Tensor:
        return codes_XD.view(torch.float8_e4m3fn).float()


def tile_index(kv_N2KBW: Tensor, tiles_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(block, side, head) of tiles, each (block · sides + side) · K + head."""
    _, num_sides, num_heads, _, _ = kv_N2KBW.shape
    return tiles_R // (num_sides * num_heads), tiles_R // num_heads % num_sides, tiles_R % num_heads


def read_tiles(kv_N2KBW: Tensor, tiles_R: Tensor) -> Tensor:
    """tiles_RBW, copied. A layer whose blocks are parts of larger ones need not be contiguous."""
    num_blocks, num_sides, num_heads, block_size, width = kv_N2KBW.shape
    tile, per_block, stride = block_size * width, num_sides * num_heads, kv_N2KBW.stride(0)
    if stride % tile:
        return kv_N2KBW[tile_index(kv_N2KBW, tiles_R)]
    num_tiles = (num_blocks - 1) * (stride // tile) + per_block
    if stride != per_block * tile:
        tiles_R = tiles_R + tiles_R // per_block * (stride // tile - per_block)
    rows_YP = kv_N2KBW.as_strided((num_tiles, tile), (tile, 1))
    return rows_YP.index_select(0, tiles_R).view(-1, block_size, width)


def code_offsets(block_size: int, head_dim: int) -> Tensor:
    """offsets_2P: the offset in the tile of byte p of its contiguous rows (P = B · W).

    For keys and for values; the same as `code_place` of native/attention/attention.h.
    """
    codes_BD = torch.arange(block_size * head_dim).view(block_size, head_dim)
    scales_B4 = (torch.arange(SCALE_BYTES * block_size) + codes_BD.numel()).view(block_size, -1)
    sides = (_by_fours(block_size, head_dim), _by_fours(head_dim, block_size, (0, 2, 1, 3)).T)
    return torch.stack([torch.cat([side_BD, scales_B4], dim=1).flatten() for side_BD in sides])


def row_offsets(block_size: int, head_dim: int) -> Tensor:
    """offsets_2P of tiles that are rows of codes, then scales: keys and values alike."""
    codes_BD = torch.arange(block_size * head_dim).view(block_size, head_dim)
    scales_B4 = (torch.arange(SCALE_BYTES * block_size) + codes_BD.numel()).view(block_size, -1)
    return torch.cat([codes_BD, scales_B4], dim=1).flatten().expand(2, -1)


def _by_fours(across: int, along: int, order: Sequence[int] = (0, 1, 2, 3)) -> Tensor:
    """Offsets [across, along] if groups of four along `along`, in `order`, are adjacent."""
    whole = along // 4 * 4
    fours = torch.arange(across * whole).view(-1, across, 4)[..., order].permute(1, 0, 2)
    rest = torch.arange(across * whole, across * along).view(across, along - whole)
    return torch.cat([fours.reshape(across, -1), rest], dim=1)


def kv_format(name: str, device: torch.device | str = "cpu") -> KvFormat:
    """The format `name` on a device: that of a float dtype, "int8", "fp8" or "int4"."""
    if name == "int4":
        found: KvFormat = import_module("ridgeline.engine.attention.int4.format").Int4Kv()
        return found
    in_rows = torch.device(device).type == "cuda"
    if name == "int8":
        return Int8Kv(in_rows=in_rows)
    return Fp8Kv(in_rows=in_rows) if name == "fp8" else PlainKv(DTYPES[name])
