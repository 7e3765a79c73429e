"""Random paged caches, and attention over them by the float64 definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from ridgeline.engine.attention.reference import attend_one
from tests.engine.kernels.triton.interpreter import DEVICE

JUNK = 100.0
"""Fills what no sequence holds: reading it shows."""


@dataclass
class PagedCase:
    """Queries, a cache with scattered blocks, and the same keys and values dense per sequence."""

    q_THD: Tensor
    kv_N2KBW: Tensor
    tables_SM: Tensor
    starts_S1: Tensor
    lens_S: Tensor
    dense: list[Tensor]  # kv_L2KD of each sequence, float32 as the cache holds it

    @property
    def num_new(self) -> list[int]:
        return [int(n) for n in self.starts_S1.diff().tolist()]


def make_case(
    shapes: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    scaled: bool = False,
    gap: int = 0,
    seed: int = 0,
) -> PagedCase:
    """`shapes` are (keys, new queries) of each sequence, the new tokens' keys included.

    `gap` numbers lie between two blocks of the cache.
    """
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    needed = [-(-length // block_size) for length, _ in shapes]
    num_blocks, columns = sum(needed) + 2, max(needed) + 1
    free = torch.randperm(num_blocks, generator=generator).tolist()
    kv_dtype = kv_dtype or dtype
    width = head_dim + 4 if scaled else head_dim
    junk = torch.full((num_blocks, 2, num_kv_heads, block_size, head_dim), JUNK)
    kv = junk.clone()
    tables, dense = torch.zeros(len(shapes), columns, dtype=torch.int32), []
    places = []
    for row, (length, _) in enumerate(shapes):
        blocks = [free.pop() for _ in range(needed[row])]
        tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        at = torch.arange(length)
        places.append((torch.tensor(blocks, dtype=torch.long)[at // block_size], at % block_size))
        block_L, offset_L = places[-1]
        values = torch.randn(length, 2, num_kv_heads, head_dim, generator=generator)
        kv[block_L, :, :, offset_L] = values
    stored, decoded = encode_rows(kv, kv_dtype) if scaled else (kv.to(kv_dtype), None)
    decoded = stored.float() if decoded is None else decoded
    dense = [decoded[block_L, :, :, offset_L] for block_L, offset_L in places]
    num_new = [new for _, new in shapes]
    q_THD = torch.randn(sum(num_new), num_heads, head_dim, generator=generator).to(dtype)
    starts = torch.tensor([0, *num_new]).cumsum(0).int()
    lens = torch.tensor([length for length, _ in shapes], dtype=torch.int32)
    kv_N2KBW = stored.view(num_blocks, 2, num_kv_heads, block_size, width)
    memory_NP = torch.zeros((num_blocks, kv_N2KBW[0].numel() + gap), dtype=kv_N2KBW.dtype)
    memory_NP[:, gap:] = kv_N2KBW.flatten(1)
    kv_N2KBW = memory_NP.to(DEVICE)[:, gap:].view(kv_N2KBW.shape)
    on = [t.to(DEVICE) for t in (q_THD, tables, starts, lens)]
    return PagedCase(on[0], kv_N2KBW, *on[1:], dense)


def encode_rows(kv: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tiles of codes and then scales, and the numbers that they stand for."""
    largest = 127.0 if dtype == torch.int8 else 448.0
    scale = (kv.abs().amax(-1, keepdim=True) / largest).clamp(min=1e-30)
    codes = kv / scale
    codes = (codes.round() if dtype == torch.int8 else codes).to(dtype)
    tiles = (codes.flatten(-2).view(torch.uint8), scale.flatten(-2).view(torch.uint8))
    return torch.cat(tiles, -1).view(dtype), codes.float() * scale


def expected(
    case: PagedCase,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """o_THD in float32: the definition, query by query."""
    q_THD = case.q_THD.cpu().float()
    spec = SimpleNamespace(
        num_heads=q_THD.shape[1],
        num_kv_heads=case.kv_N2KBW.shape[2],
        scale=scale,
        softcap=softcap,
    )
    out, row = torch.zeros_like(q_THD), 0
    sinks_H = None if sinks_H is None else sinks_H.cpu()
    for kv_L2KD, num_new in zip(case.dense, case.num_new, strict=True):
        for position in range(len(kv_L2KD) - num_new, len(kv_L2KD)):
            first = 0 if window is None else max(0, position - window + 1)
            first = first if chunk is None else position // chunk * chunk
            if position >= 0:
                seen = kv_L2KD[first : position + 1]
                out[row] = attend_one(q_THD[row], seen, cast(Any, spec), sinks_H)
            row += 1
    return out
