"""Tile shapes of the Triton kernels, and the arithmetic of their launches.

Shapes were measured on Hopper; a card whose blocks have less shared memory gets the largest that
fit (`scripts/compile_triton.py` compiles them for each). They are functions of the card and of the
launch's shapes alone, so that nothing is tuned while a CUDA graph is captured, and a captured
launch is the one that was measured.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

SCALE_BYTES = 4
MIN_KEYS_PER_SPLIT = 128
"""Below it, writing and combining partial results costs more than the parallelism gains."""
MAX_SPLITS = 64
FLOAT32_KEYS = 16
"""Keys of a tile of float32, whose products run outside the tensor cores in registers: with 32, a
thread needs more than the 255 that there are, and 1 to 65 KiB of it went to memory."""


class AttentionTile(NamedTuple):
    """`rows` query rows of one key head against `keys` keys at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


class Card(NamedTuple):
    """Streaming multiprocessors, and bytes of shared memory that a block may have."""

    num_processors: int
    shared_bytes: int


H100 = Card(132, 227 * 1024)
ABSENT = H100
"""The card assumed for tensors that are on none: in the interpreter, and to compile for a card."""


def card_of(device: torch.device) -> Card:
    """What launches depend on of a device."""
    return _cuda_card(device.index or 0) if device.type == "cuda" else ABSENT


@cache
def _cuda_card(index: int) -> Card:
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return Card(properties["multiprocessor_count"], properties["max_shared_mem"])


def padded(size: int) -> int:
    """The next power of two, at least 16: the extents of Triton's tiles."""
    return max(16, 1 << (size - 1).bit_length())


def tile_for_decode(
    group: int, head_dim: int, dtype: torch.dtype, kv_itemsize: int, card: Card = H100
) -> AttentionTile:
    """A tile that keeps enough reads in flight to saturate the memory, for queries of `dtype`.

    One query position: 16 rows suffice for up to 16 heads per key head, a quarter of what wgmma
    needs, so the product runs on the older tensor-core instruction, which is no limit here. Two
    stages of keys and values of 128 positions were the fastest of benchmarks/gpu/sweep_tiles.py on
    an H200 at a head_dim of 128 in bfloat16: 64 KiB each, for two programs per multiprocessor.
    Smaller numbers and heads take three stages, larger heads fewer positions.
    """
    rows = padded(group)
    if dtype == torch.float32:
        return _fitted(AttentionTile(rows, FLOAT32_KEYS, 4, 2), head_dim, 4, kv_itemsize, card)
    stages = 2 if head_dim > 64 and kv_itemsize > 1 else 3
    tile = AttentionTile(rows, 32, 4, 2) if head_dim > 128 else AttentionTile(rows, 128, 4, stages)
    return _fitted(tile, head_dim, dtype.itemsize, kv_itemsize, card)


def tile_for_prefill(
    group: int,
    head_dim: int,
    max_queries: int,
    dtype: torch.dtype,
    kv_itemsize: int,
    card: Card = H100,
) -> AttentionTile:
    """A tile that fills the tensor cores: 128 rows are two warp groups of 64-row wgmma.

    Launches of few queries per sequence take the smallest tile that holds them.
    """
    least = padded(group)
    rows = min(128, max(least, padded(max_queries * group)))
    if dtype == torch.float32:
        tile = AttentionTile(least, FLOAT32_KEYS, 4, 2)
    elif head_dim > 128:
        rows = max(least, min(rows, 64))
        tile = AttentionTile(rows, 32, 4 if rows < 64 else 8, 2)
    else:
        tile = AttentionTile(rows, 64, 4 if rows < 128 else 8, 3)
    return _fitted(tile, head_dim, dtype.itemsize, kv_itemsize, card, least)


def _fitted(
    tile: AttentionTile,
    head_dim: int,
    itemsize: int,
    kv_itemsize: int,
    card: Card,
    least_rows: int | None = None,
) -> AttentionTile:
    """`tile` with as many stages, then keys, then rows as fit in a block's shared memory."""
    while attention_bytes(tile, head_dim, itemsize, kv_itemsize) > card.shared_bytes:
        if tile.num_stages > 2:
            tile = tile._replace(num_stages=tile.num_stages - 1)
        elif tile.keys > 16:
            tile = tile._replace(keys=tile.keys // 2)
        elif tile.rows > (least_rows or tile.rows):
            tile = tile._replace(rows=tile.rows // 2)
        elif tile.num_stages > 1:
            tile = tile._replace(num_stages=1)
        else:
            break
    return tile


def attention_bytes(tile: AttentionTile, head_dim: int, itemsize: int, kv_itemsize: int) -> int:
    """About as much shared memory as a tile takes: one stage is read from it while the others
    arrive, codes are widened, and queries and weights pass through it."""
    width = padded(head_dim)
    keys = 2 * tile.keys * width
    widened = keys * itemsize if kv_itemsize != itemsize else 0
    queries = tile.rows * (width * itemsize + tile.keys * itemsize)
    return (tile.num_stages - 1) * keys * kv_itemsize + widened + queries


def num_splits(num_programs: int, max_context: int, device: torch.device) -> int:
    """Among how many programs each context is divided, a power of two.

    Up to twice as many programs as multiprocessors, which hide the latency of a program's start and
    end. With 256 programs, one split was the fastest on an H200, whatever the context.
    """
    wanted = 2 * card_of(device).num_processors // max(1, num_programs)
    useful = -(-max_context // MIN_KEYS_PER_SPLIT)
    splits = max(1, min(wanted, useful, MAX_SPLITS))
    return 1 << (splits - 1).bit_length()


def scale_view(kv_N2KBW: Tensor, head_dim: int) -> Tensor | None:
    """The cache's bytes as float32, which hold the scales; None if its rows are unscaled."""
    width = kv_N2KBW.shape[-1]
    if width == head_dim:
        return None
    assert kv_N2KBW.dtype.itemsize == 1 and width == head_dim + SCALE_BYTES, kv_N2KBW.shape
    assert width % 4 == 0, f"scaled rows need a head_dim divisible by 4, not {head_dim}"
    return kv_N2KBW.view(torch.float32)
