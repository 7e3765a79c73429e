"""Tile shapes of the Triton kernels on Hopper, and the arithmetic of their launches.

Shapes are functions of the launch's shapes alone, so that nothing is tuned while a CUDA graph is
captured, and a captured launch is the one that was measured.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

SCALE_BYTES = 4
CPU_PROCESSORS = 132
"""Streaming multiprocessors assumed in the interpreter: those of an H100."""
MIN_KEYS_PER_SPLIT = 128
"""Below it, writing and combining partial results costs more than the parallelism gains."""
MAX_SPLITS = 64


class AttentionTile(NamedTuple):
    """`rows` query rows of one key head against `keys` keys at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def padded(size: int) -> int:
    """The next power of two, at least 16: the extents of Triton's tiles."""
    return max(16, 1 << (size - 1).bit_length())


def tile_for_decode(group: int, head_dim: int, itemsize: int) -> AttentionTile:
    """A tile that keeps enough reads in flight to saturate the memory.

    One query position: 16 rows suffice for up to 16 heads per key head, a quarter of what wgmma
    needs, so the product runs on the older tensor-core instruction, which is no limit here. Two
    stages of keys and values of 128 positions were the fastest of benchmarks/gpu/sweep_tiles.py on
    an H200 at a head_dim of 128 in bfloat16: 64 KiB each, for two programs per multiprocessor.
    Smaller numbers and heads take three stages, larger heads fewer positions.
    """
    if head_dim > 128:
        return AttentionTile(padded(group), 32, 4, 2)
    stages = 2 if head_dim > 64 and itemsize > 1 else 3
    return AttentionTile(padded(group), 128, 4, stages)


def tile_for_prefill(group: int, head_dim: int, max_queries: int) -> AttentionTile:
    """A tile that fills the tensor cores: 128 rows are two warp groups of 64-row wgmma.

    Launches of few queries per sequence take the smallest tile that holds them.
    """
    rows = min(128, max(padded(group), padded(max_queries * group)))
    if head_dim > 128:
        rows = max(padded(group), min(rows, 64))
        return AttentionTile(rows, 32, 4 if rows < 64 else 8, 2)
    return AttentionTile(rows, 64, 4 if rows < 128 else 8, 3)


def num_splits(num_programs: int, max_context: int, device: torch.device) -> int:
    """Among how many programs each context is divided, a power of two.

    Up to twice as many programs as multiprocessors, which hide the latency of a program's start and
    end. With 256 programs, one split was the fastest on an H200, whatever the context.
    """
    wanted = 2 * num_processors(device) // max(1, num_programs)
    useful = -(-max_context // MIN_KEYS_PER_SPLIT)
    splits = max(1, min(wanted, useful, MAX_SPLITS))
    return 1 << (splits - 1).bit_length()


def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a device."""
    return _num_processors(device.index or 0) if device.type == "cuda" else CPU_PROCESSORS


@cache
def _num_processors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def scale_view(kv_N2KBW: Tensor, head_dim: int) -> Tensor | None:
    """The cache's bytes as float32, which hold the scales; None if its rows are unscaled."""
    width = kv_N2KBW.shape[-1]
    if width == head_dim:
        return None
    assert kv_N2KBW.dtype.itemsize == 1 and width == head_dim + SCALE_BYTES, kv_N2KBW.shape
    assert width % 4 == 0, f"scaled rows need a head_dim divisible by 4, not {head_dim}"
    return kv_N2KBW.view(torch.float32)
