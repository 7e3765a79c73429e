"""Memory in pages of 2 MB, for what every step streams through: packed weights, keys and values.

A core that streams through pages of 4 KB needs the place of another page with every 64th line, of
weights and of their scales, and waits for some of these walks: on a virtual Xeon a product of one
row took 1.2 times as long (docs/concepts/kernels.md). Linux gives large pages to anonymous memory that
asks for them (madvise(2), MADV_HUGEPAGE; /sys/kernel/mm/transparent_hugepage/enabled says whether
it does), where 2 MB of it begin at a multiple of 2 MB. So tensors of any size are cut from slabs.

When it loses: memory is given back a slab at a time, when the last tensor of a slab is gone.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20  # bytes
_ALIGNMENT = 64  # bytes: a line


def own_pages(num_bytes: int) -> Tensor:
    """Zero bytes [num_bytes] in a mapping of their own, from a multiple of 2 MB on where they fill
    a large page. The system supplies each page when it is first written."""
    if num_bytes < LARGE_PAGE:
        return _cut(_private(max(1, num_bytes)), 0, num_bytes)
    mapping = _mapping(num_bytes)
    return _cut(mapping, _first(mapping), num_bytes)


class Slabs:
    """Cuts tensors from mappings that nothing but these keeps alive.

    So many bytes are mapped at once; memory is taken for what is written.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._lock = threading.Lock()
        self.slab: Callable[[], mmap.mmap | None] = lambda: None
        self._at = self._end = 0

    def take(self, num_bytes: int) -> Tensor:
        """Zero bytes [num_bytes], at a multiple of 64."""
        if num_bytes > self._num_bytes:
            return own_pages(num_bytes)
        with self._lock:
            slab = self.slab()
            if slab is None or self._end - self._at < num_bytes:
                slab = _mapping(self._num_bytes)
                self.slab, self._at = weakref.ref(slab), _first(slab)
                self._end = self._at + self._num_bytes
            taken = _cut(slab, self._at, num_bytes)
            self._at += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return taken


_SLABS = Slabs(32 * LARGE_PAGE)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor in large pages, shared with others that were asked for about then."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return _SLABS.take(num_bytes).view(dtype).view(tuple(shape))


def moved(values: Tensor) -> Tensor:
    """A contiguous copy of `values` in large pages."""
    return empty(values.shape, values.dtype).copy_(values)


def _mapping(num_bytes: int) -> mmap.mmap:
    """Anonymous memory with `num_bytes` from its first large page on (`_first`)."""
    mapping = _private((-(-num_bytes // LARGE_PAGE) + 1) * LARGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without large pages gives small ones
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _private(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _first(mapping: mmap.mmap) -> int:
    """Where in a mapping its first large page begins, in bytes."""
    return -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % LARGE_PAGE


def _cut(mapping: mmap.mmap, at: int, num_bytes: int) -> Tensor:
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mapping, dtype=torch.uint8, count=num_bytes, offset=at)
