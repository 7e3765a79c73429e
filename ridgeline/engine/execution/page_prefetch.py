"""Populates pages of the KV cache before a step writes to them.

    pool hands out block b ─▶ PagePrefetcher.extend_to(b) ─▶ a thread: populate(b … b + ahead)

The operating system supplies and clears a page when it is first written. Every layer has its own
tensor, so the first block in a new large page costs one page of every layer within a single step:
0.4 ms each if the machine has the memory at hand, 5 to 6 ms if a hypervisor has to find it first.
With the six layers of the demo model that added 35 ms to the TTFT of one request in thirty, for as
long as the prefix cache keeps released blocks and new ones are handed out. Here a low-priority
thread requests the pages of the next blocks in advance (madvise(2), MADV_POPULATE_WRITE, Linux
5.14), which leaves their contents unchanged. On systems without it, pages are supplied on first
write.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch import Tensor

from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.kernels.large_pages import LARGE_PAGE

_MADV_POPULATE_WRITE = 23  # <asm-generic/mman-common.h>
_PAGES_AHEAD = 2  # large pages per layer: one is filled while the next is populated
_NICE = 10  # yields to the threads of a step


class PagePrefetcher:
    """Keeps the large pages of the next blocks of `cache` populated."""

    def __init__(
        self, cache: KvCache, populate: Callable[[Tensor, int, int], bool] | None = None
    ) -> None:
        self._layers = [layer for layer in cache.tensors if layer.device.type == "cpu"]
        self._populate = populate or populate_pages
        self._num_blocks = cache.num_blocks
        block_bytes = max([layer.nbytes // cache.num_blocks for layer in self._layers], default=1)
        self._stride = max(
            1, LARGE_PAGE // block_bytes
        )  # blocks per large page of the largest layer
        self._done = 0  # blocks whose memory was requested

    def extend_to(self, block: int) -> int:
        """Populate the pages after `block`, the highest one in use.

        Returns the block at which to call this again.
        """
        upto = min(self._num_blocks, block + (1 + _PAGES_AHEAD) * self._stride)
        if upto > self._done and self._layers:
            work = (self._layers, self._num_blocks, self._done, upto)
            self._done = upto
            threading.Thread(
                target=self._populate_blocks, args=work, name="ridgeline-pages", daemon=True
            ).start()
        return self._num_blocks if upto == self._num_blocks else block + self._stride

    def _populate_blocks(
        self, layers: Sequence[Tensor], num_blocks: int, first: int, upto: int
    ) -> None:
        if sys.platform == "linux":  # on other systems a priority applies to the whole process
            with suppress(OSError):  # a sandbox may forbid it: keep the normal priority
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        for layer in layers:
            block_bytes = layer.nbytes // num_blocks
            if not self._populate(layer, first * block_bytes, upto * block_bytes):
                return


def populate_pages(tensor: Tensor, first: int, end: int) -> bool:
    """Have the operating system supply the whole pages within bytes first … end of `tensor`.

    Contents are unchanged. Returns False if the system does not support it.
    """
    if sys.platform != "linux":
        return False
    page = os.sysconf("SC_PAGE_SIZE")
    address = tensor.data_ptr()
    begin = (
        max(-(-address // page), (address + first) // page) * page
    )  # none that is shared with a neighbour
    length = (address + end) // page * page - begin
    if length <= 0:
        return True
    libc = ctypes.CDLL(None, use_errno=True)  # calls through it release the GIL
    call = libc.madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(call(begin, length, _MADV_POPULATE_WRITE) == 0)
