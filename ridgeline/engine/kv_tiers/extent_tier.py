"""One tier of storage: an index of extents by key, bounded in size, least recently used first.

The index is rebuilt from the files' headers, so it survives a crash at any point and finds what
other processes have written. Content is checked when it is read: an extent that is not what its
header says is removed, and its blocks are computed again.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec

from ridgeline.engine.kv_tiers.base import ExtentFiles
from ridgeline.engine.kv_tiers.extent import (
    HEAD_BYTES,
    BadExtentError,
    ExtentHeader,
    decode_header,
    encode_header,
    extent_name,
    header_end,
)
from ridgeline.engine.scheduler.kv.cache_tiers import Rate
from ridgeline.engine.scheduler.kv.memory_tier import Key

_LOG = logging.getLogger(__name__)
REFRESH_S = 10.0
"""Seconds after which the files of other processes are looked for again."""

PAUSE_S = 60.0
"""Seconds without writing after the storage was full or failed."""

Place = tuple[str, int]
"""An extent's name, and the index of a block in it."""


class TierCounts(msgspec.Struct):
    """Counts since the engine was opened."""

    loads: int = 0
    load_bytes: int = 0
    stores: int = 0
    store_bytes: int = 0
    errors: int = 0


class _Extent(msgspec.Struct, frozen=True):
    header: ExtentHeader
    start: int  # of the first block


class ExtentTier:
    """Blocks of one cache (`signature`) in `files`.

    `max_bytes` bounds all extents together, those of other models included; None leaves the bound
    to the storage. Thread-safe. No method raises an OSError: it is counted, and blocks are missing.
    """

    def __init__(
        self,
        name: str,
        files: ExtentFiles,
        signature: str,
        block_bytes: int,
        *,
        max_bytes: int | None,
        rate: Rate,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.rate, self.counts, self.num_bytes = name, rate, TierCounts(), 0
        self._files, self._signature, self._block_bytes = files, signature, block_bytes
        self._max_bytes, self._clock = max_bytes, clock
        self._lock = threading.Lock()
        self._place_of: dict[Key, Place] = {}
        self._extents: dict[str, _Extent] = {}
        self._foreign: set[str] = set()  # files that are no extents of this cache
        self._refreshed_s = -REFRESH_S
        self._paused_until_s = -1.0

    def __len__(self) -> int:
        return len(self._place_of)

    def __contains__(self, key: Key) -> bool:
        return key in self._place_of

    @property
    def is_stale(self) -> bool:
        """Whether it is time for `refresh`."""
        return self._clock() - self._refreshed_s >= REFRESH_S

    def refresh(self) -> None:
        """Find extents that are new, and forget those that are gone."""
        self._refreshed_s = self._clock()
        prefix = self._signature + "/"
        try:
            files = self._files.list()
        except OSError as error:
            self._count_error("list", error)
            return
        self.num_bytes = sum(file.size for file in files)
        sizes = {file.name: file.size for file in files if file.name.startswith(prefix)}
        for name in [name for name in self._extents if name not in sizes]:
            self._forget(name)
        for name, size in sizes.items():
            if name not in self._extents and name not in self._foreign:
                self._read_header(name, size)

    def read(self, keys: Sequence[Key], target: Callable[[Key], memoryview]) -> set[Key]:
        """Read blocks into the buffers of `target`; returns those that arrived intact."""
        began_s = self._clock()
        by_extent: dict[str, list[tuple[int, Key]]] = defaultdict(list)
        with self._lock:
            for key in keys:
                place = self._place_of.get(key)
                if place is not None:
                    by_extent[place[0]].append((place[1], key))
        intact: set[Key] = set()
        for name, wanted in by_extent.items():
            intact |= self._read_extent(name, sorted(wanted), target)
        nbytes = len(intact) * self._block_bytes
        self.counts.loads += len(intact)
        self.counts.load_bytes += nbytes
        self.rate.observe(nbytes, self._clock() - began_s)
        return intact

    def write(self, keys: Sequence[Key], blocks: Sequence[memoryview]) -> None:
        """Write blocks as one extent, making room first; does nothing while writing is paused."""
        if self._clock() < self._paused_until_s:
            return
        header = ExtentHeader(
            self._signature, self._block_bytes, list(keys), [zlib.crc32(block) for block in blocks]
        )
        head, name = encode_header(header), self._name(extent_name(keys))
        size = len(head) + len(keys) * self._block_bytes
        try:
            self._make_room(size)
            self._files.write(name, [head, *blocks])
        except OSError as error:
            self._count_error("write", error)
            self._paused_until_s = self._clock() + PAUSE_S
            return
        self.num_bytes += size
        self.counts.stores += len(keys)
        self.counts.store_bytes += len(keys) * self._block_bytes
        self._add(name, _Extent(header, len(head)))

    def forget(self, keys: Sequence[Key]) -> None:
        """Remove the extents that hold any of the blocks."""
        with self._lock:
            names = {self._place_of[key][0] for key in keys if key in self._place_of}
        for name in names:
            self._forget(name)
            try:
                self._files.delete(name)
            except OSError as error:
                self._count_error("delete", error)

    # -- extents

    def _name(self, file: str) -> str:
        return f"{self._signature}/{file[:2]}/{file}"

    def _add(self, name: str, extent: _Extent) -> None:
        with self._lock:
            self._extents[name] = extent
            for i, key in enumerate(extent.header.keys):
                self._place_of[key] = (name, i)

    def _forget(self, name: str) -> None:
        with self._lock:
            extent = self._extents.pop(name, None)
            for key in extent.header.keys if extent is not None else ():
                if self._place_of.get(key, ("", 0))[0] == name:
                    del self._place_of[key]

    def _read_header(self, name: str, size: int) -> None:
        try:
            head = self._files.head(name, HEAD_BYTES)
            end = header_end(head)
            if end > len(head):
                head = self._files.head(name, end)
            header = decode_header(head, size, self._signature, self._block_bytes)
        except OSError:
            return  # gone, or not readable now
        except BadExtentError as error:
            self._discard(name, error)
            return
        self._add(name, _Extent(header, end))

    def _read_extent(
        self, name: str, wanted: Sequence[tuple[int, Key]], target: Callable[[Key], memoryview]
    ) -> set[Key]:
        extent = self._extents.get(name)
        if extent is None:
            return set()
        intact: set[Key] = set()
        try:
            for first, run in _consecutive(wanted):
                buffers = [target(key) for key in run]
                self._files.read(name, extent.start + first * self._block_bytes, buffers)
                for i, (key, buffer) in enumerate(zip(run, buffers, strict=True), start=first):
                    if zlib.crc32(buffer) != extent.header.checksums[i]:
                        raise BadExtentError("a block does not match its checksum")
                    intact.add(key)
        except FileNotFoundError:
            self._forget(name)
        except (EOFError, BadExtentError) as error:
            self._discard(name, error)
        except OSError as error:
            self._count_error("read", error)
            self._forget(name)
        else:
            self._files.touch(name)
        return intact

    def _discard(self, name: str, error: Exception) -> None:
        """Remove a file that is damaged."""
        self.counts.errors += 1
        _LOG.warning("the KV tier %s removes %s: %s", self.name, name, error)
        self._foreign.add(name)
        self._forget(name)
        try:
            self._files.delete(name)
        except OSError as failure:
            self._count_error("delete", failure)

    def _make_room(self, size: int) -> None:
        """Remove the extents that were used least recently, until `size` bytes fit."""
        if self._max_bytes is None or self.num_bytes + size <= self._max_bytes:
            return
        files = sorted(self._files.list(), key=lambda file: file.used_s)
        total = sum(file.size for file in files)
        for file in files:
            if total + size <= self._max_bytes:
                break
            self._files.delete(file.name)
            self._forget(file.name)
            total -= file.size
        self.num_bytes = total
        if total + size > self._max_bytes:
            raise OSError(errno.ENOSPC, f"an extent of {size} bytes exceeds the limit")

    def _count_error(self, doing: str, error: OSError) -> None:
        self.counts.errors += 1
        _LOG.warning("the KV tier %s cannot %s: %s", self.name, doing, error)


def _consecutive(wanted: Sequence[tuple[int, Key]]) -> list[tuple[int, list[Key]]]:
    """(index of the first, keys) of each run of neighbouring blocks, of a sorted sequence."""
    runs: list[tuple[int, list[Key]]] = []
    for i, key in wanted:
        if runs and runs[-1][0] + len(runs[-1][1]) == i:
            runs[-1][1].append(key)
        else:
            runs.append((i, [key]))
    return runs
