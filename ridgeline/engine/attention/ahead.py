"""Memory of the KV cache supplied before a step writes to it.

    pool gives block b ─▶ PagesAhead.reached(b) ─▶ a short thread: populate(b … b + ahead)

The system supplies a page when it is first written, and clears it first. Every layer has its own
tensor, so that the first block in a new large page costs one such page of every layer within one
step: 0.4 ms each where the machine has the memory at hand, 5 to 6 where a hypervisor must find it
first; the demo model's six layers made 35 ms of time to first token out of it, for one request in
thirty, for as long as the prefix cache keeps every block for later and new ones are taken. Here a
thread of low priority asks for the pages (madvise(2), MADV_POPULATE_WRITE, Linux 5.14) that the
next blocks lie in: contents stay as they are. Where the system cannot, pages come when they are
written, as before.
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
_PAGES_AHEAD = 2  # large pages of each layer: one being filled while the other is supplied
_NICE = 10  # gives way to the threads of a step


class PagePrefetcher:
    """Keeps the large pages behind the next blocks of `cache` supplied."""

    def __init__(
        self, cache: KvCache, populate: Callable[[Tensor, int, int], bool] | None = None
    ) -> None:
        self._layers = [layer for layer in cache.layers if layer.device.type == "cpu"]
        self._populate = populate or populate_pages
        self._num_blocks = cache.num_blocks
        most = max([layer.nbytes // cache.num_blocks for layer in self._layers], default=1)
        self._stride = max(1, LARGE_PAGE // most)  # blocks that fill a large page of some layer
        self._done = 0  # blocks whose memory was asked for

    def extend_to(self, block: int) -> int:
        """Blocks up to `block` are in use: ask for what lies behind them. Gives the block at which
        to be told again.
        """
        upto = min(self._num_blocks, block + (1 + _PAGES_AHEAD) * self._stride)
        if upto > self._done and self._layers:
            work = (self._layers, self._num_blocks, self._done, upto)
            self._done = upto
            threading.Thread(
                target=self._ask, args=work, name="ridgeline-pages", daemon=True
            ).start()
        return self._num_blocks if upto == self._num_blocks else block + self._stride

    def _ask(self, layers: Sequence[Tensor], num_blocks: int, first: int, upto: int) -> None:
        if sys.platform == "linux":  # elsewhere a priority is of the whole process
            with suppress(OSError):  # a sandbox that forbids it: as everybody else, then
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        for layer in layers:
            each = layer.nbytes // num_blocks
            if not self._populate(layer, first * each, upto * each):
                return


def populate_pages(tensor: Tensor, first: int, end: int) -> bool:
    """Have the system supply the whole pages among bytes first … end of `tensor`, as they are:
    zeros, or what was written. False where it cannot.
    """
    if sys.platform != "linux":
        return False
    page = os.sysconf("SC_PAGE_SIZE")
    address = tensor.data_ptr()
    begin = max(-(-address // page), (address + first) // page) * page  # none of its neighbours'
    length = (address + end) // page * page - begin
    if length <= 0:
        return True
    libc = ctypes.CDLL(None, use_errno=True)  # calls through it let other threads run
    call = libc.madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(call(begin, length, _MADV_POPULATE_WRITE) == 0)
