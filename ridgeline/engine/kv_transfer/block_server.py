"""Hands out the blocks of leases: a listener, and a thread for each decode server that fetches."""

from __future__ import annotations

import logging
import socket
import threading
import zlib
from contextlib import suppress

from ridgeline.engine.kv_tiers.block_slab import BlockSlab
from ridgeline.engine.kv_transfer.leases import PrefixLease, PrefixLeases
from ridgeline.engine.kv_transfer.shared_memory import SharedRows
from ridgeline.engine.kv_transfer.wire import (
    VERSION,
    Alive,
    Ended,
    Hello,
    NotOpened,
    Opened,
    ProtocolError,
    SentBlock,
    SentBlocks,
    receive,
    send,
)
from ridgeline.errors import CannotRun

_LOG = logging.getLogger(__name__)
HEARTBEAT_S = 1.0
"""How often a decode server hears that its prompt is still being computed."""

HELLO_S = 5.0
SEND_S = 30.0
MAX_CONNECTIONS = 256
_BATCH = 32  # blocks of one message: one side checks while the other copies
_TICK_S = 1.0  # leases expire to this precision


class BlockServer:
    """Serves `leases` whose blocks are rows of `slab`; `shared` is its memory if others may map it.

    Raises CannotRun if the address cannot be listened on.
    """

    def __init__(
        self,
        leases: PrefixLeases,
        slab: BlockSlab,
        signature: str,
        host: str,
        port: int,
        shared: SharedRows | None,
    ) -> None:
        self.num_bytes = 0
        self._leases, self._slab, self._signature, self._shared = leases, slab, signature, shared
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise CannotRun(
                "the address of --disaggregation-host cannot be listened on",
                value=f"{host}:{port}",
                fix=f"choose an address of this machine and a free port ({error.strerror})",
            ) from None
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self._listener.settimeout(_TICK_S)
        self._is_open = True
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._connections: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, name="ridgeline-kv-serve", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and break off the connections."""
        self._is_open = False
        self._listener.close()
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _accept(self) -> None:
        while self._is_open:
            self._leases.expire()
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # closed
                return
            if not self._room.acquire(blocking=False):
                connection.close()
                continue
            self._connections.add(connection)
            threading.Thread(
                target=self._serve, args=(connection,), name="ridgeline-kv-send", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(HELLO_S)
            self._answer(connection, receive(connection, Hello))
        except (OSError, ProtocolError) as error:
            _LOG.info("a fetch of KV blocks ended early: %s", error)
        except Exception:
            _LOG.exception("a fetch of KV blocks failed")
        finally:
            self._connections.discard(connection)
            connection.close()
            self._room.release()

    def _answer(self, connection: socket.socket, hello: Hello) -> None:
        lease = self._leases.connect(hello.lease)
        if lease is None:
            send(connection, Ended("lease"))
            return
        try:
            if (reason := self._refusal(hello, lease)) is not None:
                send(connection, Ended(reason))
                return
            connection.settimeout(SEND_S)
            self._send_blocks(connection, hello, lease)
            connection.settimeout(SEND_S)
            with suppress(OSError):
                connection.recv(1)  # shared memory is read until the other side has closed
        finally:
            self._leases.close(lease.id)

    def _refusal(self, hello: Hello, lease: PrefixLease) -> str | None:
        if (hello.version, hello.signature) != (VERSION, self._signature):
            return "signature"
        return "content" if hello.digest != lease.digest else None

    def _send_blocks(self, connection: socket.socket, hello: Hello, lease: PrefixLease) -> None:
        shared = None if hello.transport == "tcp" or self._shared is None else self._shared.address
        if shared is None and hello.transport == "shm":
            send(connection, Ended("unsupported"))
            return
        send(connection, Opened(self._slab.block_bytes, shared))
        if shared is not None and isinstance(receive(connection, Alive | NotOpened), NotOpened):
            shared = None
        wanted, num_seen = set(hello.wanted), 0
        while wanted:
            new = self._leases.wait(lease, num_seen, HEARTBEAT_S)
            num_seen += len(new)
            own = [(place, slot) for place, slot in new if place in wanted]
            wanted.difference_update(place for place, _ in own)
            for i in range(0, len(own), _BATCH):
                self._send(connection, own[i : i + _BATCH], inline=shared is None)
            if own:
                continue
            if lease.is_ended and not new:
                break
            if not new:
                send(connection, Alive())
        send(connection, Ended(lease.error if wanted else ""))

    def _send(
        self,
        connection: socket.socket,
        blocks: list[tuple[tuple[int, int], int]],
        *,
        inline: bool,
    ) -> None:
        rows = [self._slab.row(slot) for _, slot in blocks]
        sent = [
            SentBlock(group, place, zlib.crc32(row), slot)
            for ((group, place), slot), row in zip(blocks, rows, strict=True)
        ]
        send(connection, SentBlocks(sent, inline))
        for row in rows if inline else ():
            connection.sendall(row)
        self.num_bytes += len(rows) * self._slab.block_bytes
