"""Memory in pages of 2 MB, for what every step streams through: packed weights, keys and values.

With pages of 4 KB, a core needs an address translation every 64 cache lines, and waits for some of
the page walks: on a virtual Xeon a product of one row took 1.2 times as long
(docs/concepts/kernels.md). Linux gives large pages to anonymous memory on request (madvise(2),
MADV_HUGEPAGE; /sys/kernel/mm/transparent_hugepage/enabled says whether it does), where 2 MB of it
start at a multiple of 2 MB. So tensors of any size are cut from slabs.

When it loses: memory is returned a slab at a time, when the last tensor of a slab is gone.
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
    """Zeroed bytes [num_bytes] in a separate mapping, aligned to 2 MB if they fill a large page.
    The system supplies each page when it is first written."""
    if num_bytes < LARGE_PAGE:
        return _cut(_private(max(1, num_bytes)), 0, num_bytes)
    mapping = _mapping(num_bytes)
    return _cut(mapping, _first(mapping), num_bytes)


class Slabs:
    """Cuts tensors from mappings, which live as long as their tensors.

    `num_bytes` are mapped at once; the system supplies only what is written.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._lock = threading.Lock()
        self.slab: Callable[[], mmap.mmap | None] = lambda: None
        self._at = self._end = 0

    def take(self, num_bytes: int) -> Tensor:
        """Zeroed bytes [num_bytes], aligned to 64."""
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
    """An uninitialised contiguous tensor in large pages, which it shares with other tensors."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return _SLABS.take(num_bytes).view(dtype).view(tuple(shape))


def moved(values: Tensor) -> Tensor:
    """A contiguous copy of `values` in large pages."""
    return empty(values.shape, values.dtype).copy_(values)


def _mapping(num_bytes: int) -> mmap.mmap:
    """Anonymous memory with at least `num_bytes` behind the start of its first large page."""
    mapping = _private((-(-num_bytes // LARGE_PAGE) + 1) * LARGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without large pages gives small ones
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _private(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _first(mapping: mmap.mmap) -> int:
    """The offset of a mapping's first large page, in bytes."""
    return -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % LARGE_PAGE


def _cut(mapping: mmap.mmap, at: int, num_bytes: int) -> Tensor:
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mapping, dtype=torch.uint8, count=num_bytes, offset=at)
