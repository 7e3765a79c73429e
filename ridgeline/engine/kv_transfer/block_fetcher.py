"""Fetches blocks from prefill servers into the memory tier, each fetch on a separate thread.

Whatever goes wrong, the blocks that came intact are kept, the rest is computed, and the reason is
counted:

    not_allowed      the server is not among --disaggregation-peers
    unsupported      the request needs its whole prompt computed here, or the transport is refused
    slower           moving the blocks would take longer than computing them
    signature        other weights, formats, kernels or version
    content          the prefill server computed other tokens
    lease            the lease is unknown: expired, taken, or of a server that was restarted
    prefill_failed   the prefill server gave up: aborted, or out of memory slots (no_room)
    unreachable      no connection
    lost             the connection broke
    stalled          no byte for too long
    checksum         a block does not match its checksum
    no_room          no memory slot was free, there or here
    timeout          the wait was over before all of them had come
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt

from ridgeline.engine.kv_tiers.block_slab import BlockSlab
from ridgeline.engine.kv_transfer.shared_memory import ForeignRows
from ridgeline.engine.kv_transfer.wire import (
    VERSION,
    Alive,
    Answer,
    Ended,
    Hello,
    NotOpened,
    Opened,
    ProtocolError,
    SentBlock,
    SentBlocks,
    read_into,
    receive,
    send,
)
from ridgeline.engine.scheduler.kv.block_transfer import Place
from ridgeline.engine.scheduler.kv.cache_tiers import Rate
from ridgeline.engine.scheduler.kv.memory_tier import Key, MemoryTier
from ridgeline.records import KvTransferParams
from ridgeline.records.kv_transfer import TRANSFER_FALLBACKS

_LOG = logging.getLogger(__name__)
CONNECT_S = 2.0
STALL_S = 5.0
"""The longest silence of a prefill server, which sends a message every second."""

MAX_FETCHES = 64
TIER = "peer"
"""The name of the tier that fetched blocks come from."""


class FetchStopped(Exception):
    """A fetch ends before everything has come; its argument is the reason."""


class PeerFetch:
    """One fetch. `wanted` are the keys under which its blocks are published in the memory tier."""

    def __init__(self, memory: MemoryTier, wanted: Sequence[tuple[Place, Key]]) -> None:
        self.wanted = dict(wanted)
        self._memory, self._lock = memory, threading.Lock()
        self._slots: list[int] = []
        self._is_over = self.is_released = False
        self.connection: socket.socket | None = None

    def is_over(self) -> bool:
        return self._is_over

    def finish(self) -> None:
        """Nothing more will come."""
        self._is_over = True

    def release(self) -> None:
        with self._lock:
            self.is_released = True
            slots, self._slots = self._slots, []
        self._memory.unpin(slots)
        connection = self.connection
        if not self._is_over and connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def add(self, place: Place, slot: int) -> None:
        """A block is in a reserved slot: publish it, and keep it until `release`."""
        key = self.wanted.pop(place)
        if not self._memory.publish(key, slot, TIER, pinned=True):
            own = self._memory.pin(key)
            if own is None:
                return
            slot = own
        with self._lock:
            if not self.is_released:
                self._slots.append(slot)
                return
        self._memory.unpin([slot])


class PeerClient:
    """The prefill servers that match `peers`, patterns of HOST:PORT. Thread-safe.

    `on_loaded` is called by a thread after each fetch.
    """

    def __init__(
        self,
        memory: MemoryTier,
        slab: BlockSlab,
        signature: str,
        *,
        peers: Sequence[str],
        transport: str,
        timeout_s: float,
    ) -> None:
        self.timeout_s, self.rate = timeout_s, Rate(1e9, 0.002)
        self.on_loaded: Callable[[], None] = _ignore
        self.num_fetches = self.num_blocks = self.num_bytes = self.num_shared_bytes = 0
        self.fetch_s, self.block_bytes = 0.0, slab.block_bytes
        self.fallbacks = dict.fromkeys(TRANSFER_FALLBACKS, 0)
        self._memory, self._slab, self._signature = memory, slab, signature
        self._peers, self._transport = tuple(peers), transport
        self._foreign = ForeignRows()
        self._lock = threading.Lock()
        self._num_reserved = 0
        self._fetches: set[PeerFetch] = set()
        self._threads = ThreadPoolExecutor(MAX_FETCHES, "ridgeline-kv-fetch")

    def seconds(self, nbytes: int) -> float:
        return self.rate.seconds(nbytes)

    def fetch(
        self, source: KvTransferParams, digest: bytes, wanted: Sequence[tuple[Place, Key]]
    ) -> PeerFetch | None:
        reason = ""
        if source.remote_engine_id != self._signature:
            reason = "signature"
        elif not self._is_allowed(source):
            reason = "not_allowed"
        elif not self._reserve(len(wanted)):
            reason = "no_room"
        if reason:
            self.decline(source, reason)
            return None
        self.num_fetches += 1
        fetch = PeerFetch(self._memory, wanted)
        self._fetches.add(fetch)
        self._threads.submit(self._run, fetch, source, digest)
        return fetch

    def decline(self, source: KvTransferParams, reason: str) -> None:
        if reason:
            self._count(reason)
        if self._is_allowed(source):
            self._threads.submit(self._let_go, source)

    def close(self) -> None:
        """Stop, and break off the fetches that are under way."""
        for fetch in list(self._fetches):
            fetch.release()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _reserve(self, num_slots: int) -> bool:
        """Half of the slots at most are kept for sequences that wait."""
        with self._lock:
            has_room = self._num_reserved + num_slots <= self._memory.num_slots // 2
            self._num_reserved += num_slots if has_room else 0
        return has_room

    def _count(self, reason: str) -> None:
        with self._lock:
            self.fallbacks[reason if reason in self.fallbacks else "lost"] += 1

    def _is_allowed(self, source: KvTransferParams) -> bool:
        address = f"{source.remote_host}:{source.remote_port}"
        return any(fnmatchcase(address, pattern) for pattern in self._peers)

    # -- on the threads

    def _run(self, fetch: PeerFetch, source: KvTransferParams, digest: bytes) -> None:
        num_wanted, reason = len(fetch.wanted), ""
        try:
            self._receive(fetch, source, digest)
        except FetchStopped as stopped:
            reason = str(stopped)
        except TimeoutError:
            reason = "stalled"
        except (OSError, ProtocolError):
            reason = "lost"
        except Exception:
            _LOG.exception("a fetch of KV blocks failed")
            reason = "lost"
        finally:
            if fetch.wanted:
                self._count("timeout" if fetch.is_released else reason or "prefill_failed")
                _LOG.info("%d blocks of a prompt are computed here: %s", len(fetch.wanted), reason)
            with self._lock:
                self._num_reserved -= num_wanted
            self._fetches.discard(fetch)
            fetch.finish()
            self.on_loaded()

    def _let_go(self, source: KvTransferParams) -> None:
        """Tell the prefill server that no fetch will come: it closes the lease of a wrong hello."""
        gone = suppress(OSError, ProtocolError, FetchStopped)  # the lease expires
        with gone, self._connect(source) as connection:
            send(connection, Hello(VERSION, source.remote_request_id, "", b"", []))
            receive(connection, Answer)

    def _connect(self, source: KvTransferParams) -> socket.socket:
        address = source.remote_host, source.remote_port
        try:
            connection = socket.create_connection(address, CONNECT_S)
        except OSError:
            raise FetchStopped("unreachable") from None
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(STALL_S)
        return connection

    def _receive(self, fetch: PeerFetch, source: KvTransferParams, digest: bytes) -> None:
        with self._connect(source) as connection:
            fetch.connection = connection
            if fetch.is_released:
                return
            wanted, lease = list(fetch.wanted), source.remote_request_id
            send(
                connection,
                Hello(VERSION, lease, self._signature, digest, wanted, self._transport),
            )
            foreign: npt.NDArray[np.uint8] | None = None
            while not fetch.is_released:
                message = receive(connection, Answer)
                if isinstance(message, Ended):
                    if message.reason:
                        raise FetchStopped(message.reason)
                    return
                if isinstance(message, Opened):
                    foreign = self._open(connection, message)
                elif isinstance(message, SentBlocks):
                    self._take(fetch, connection, message, foreign)

    def _open(self, connection: socket.socket, message: Opened) -> npt.NDArray[np.uint8] | None:
        """The rows of the prefill server's memory; None if blocks will come over TCP."""
        if message.block_bytes != self._slab.block_bytes:
            raise FetchStopped("signature")
        if message.memory is None:
            return None
        rows = self._foreign.rows(message.memory, message.block_bytes)
        if rows is None and self._transport == "shm":
            raise FetchStopped("unsupported")
        send(connection, NotOpened() if rows is None else Alive())
        return rows

    def _take(
        self,
        fetch: PeerFetch,
        connection: socket.socket,
        message: SentBlocks,
        foreign: npt.NDArray[np.uint8] | None,
    ) -> None:
        began_s = time.perf_counter()
        for block in message.blocks:
            if (block.group, block.place) not in fetch.wanted:
                raise ProtocolError("a block that was not asked for")
            slot = self._memory.reserve()
            if slot is None:
                raise FetchStopped("no_room")
            try:
                self._fill(connection, message, foreign, block, slot)
            except BaseException:
                self._memory.give_back(slot)
                raise
            fetch.add((block.group, block.place), slot)
        num_bytes, seconds = (
            len(message.blocks) * self._slab.block_bytes,
            time.perf_counter() - began_s,
        )
        self.rate.observe(num_bytes, seconds)
        with self._lock:
            self.num_blocks += len(message.blocks)
            self.num_bytes += num_bytes
            self.num_shared_bytes += 0 if message.inline else num_bytes
            self.fetch_s += seconds

    def _fill(
        self,
        connection: socket.socket,
        message: SentBlocks,
        foreign: npt.NDArray[np.uint8] | None,
        block: SentBlock,
        slot: int,
    ) -> None:
        """Copy a block into a slot and check it. Raises FetchStopped, OSError, ProtocolError."""
        row = self._slab.row(slot)
        if message.inline:
            read_into(connection, row)
        elif foreign is None or not 0 <= block.slot < len(foreign):
            raise ProtocolError("a block in memory that is not open")
        else:
            np.copyto(np.frombuffer(row, np.uint8), foreign[block.slot])
        if zlib.crc32(row) != block.checksum:
            raise FetchStopped("checksum")


def _ignore() -> None:
    """No sequence waits."""
