"""From whoever words a stream to its socket: at once where that can be, else in order.

The engine's news come as calls on the event loop. Where the server's own protocol is below
(`safety/protocol.py`) and its buffer is not full, a piece is written then and there: no task is
woken for a token. Where the client reads too slowly, or something else is below (a test, a batch
line), pieces are held and sent by a task, joined. What is held is bounded: a client that does not
read is cut off rather than remembered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Protocol

from starlette.types import Scope, Send

from ridgeline.serve.errors import ClientGone

MAX_HELD_BYTES = 1 << 20
"""Of one stream, beyond what its socket has taken."""

CONNECTION = "ridgeline.connection"
"""Where a scope keeps its `Connection`, if it has one."""


class Connection(Protocol):
    """What a stream may do to the connection it is on."""

    def write_chunk(self, data: bytes) -> bool:
        """Write a chunk of the body at once; False where it must wait its turn."""
        ...

    def cut(self) -> None:
        """End it now, whatever has not been sent."""
        ...


class Outlet:
    """See the head of this file."""

    def __init__(self, send: Send, connection: Connection | None) -> None:
        self._send, self._connection = send, connection
        self._held: list[bytes] = []
        self._num_held = 0
        self._is_sending = self._is_over = self._is_full = False
        self._wake = asyncio.Event()

    def put(self, data: bytes) -> None:
        """The next piece."""
        if not data or self._is_full:
            return
        straight = self._connection is not None and not (self._held or self._is_sending)
        if straight and self._connection is not None and self._connection.write_chunk(data):
            return
        self._held.append(data)
        self._num_held += len(data)
        if self._num_held > MAX_HELD_BYTES:
            self._is_full, self._held = True, []
            if self._connection is not None:
                self._connection.cut()
        self._wake.set()

    def end(self, data: bytes) -> None:
        """The last piece: it goes with the end of the body, in one write."""
        self._held.append(data)
        self._is_over = True
        self._wake.set()

    async def run(self) -> None:
        """Send what is held until the end; ClientGone where the client does not read."""
        is_over = False
        while not is_over:
            await self._wake.wait()
            self._wake.clear()
            if self._is_full:
                raise ClientGone
            self._is_sending = True
            while self._held:
                is_over, data = self._is_over, b"".join(self._held)
                self._held, self._num_held = [], 0
                body = {"type": "http.response.body", "body": data, "more_body": not is_over}
                await self._send(body)
            self._is_sending = False


@contextlib.asynccontextmanager
async def outlet(scope: Scope, send: Send) -> AsyncIterator[Outlet]:
    """Where to put the pieces of a body; after `end`, all are on their way when the block ends."""
    found = Outlet(send, (scope.get("extensions") or {}).get(CONNECTION))
    runner = asyncio.create_task(found.run())
    try:
        yield found
        await runner
    finally:
        runner.cancel()
        await asyncio.gather(runner, return_exceptions=True)
