"""From whoever words a stream to its socket: at once where that can be, else in order.

The engine's news come as calls on the event loop. Where the server's own protocol is below
(`safety/protocol.py`) and its buffer is not full, a piece is written then and there: no task is
woken for a token. That holds for the first one too, which takes the head of the answer along, in
one write: with two dozen streams beside it, every turn of the loop that a first token waits for
costs a millisecond. Where the client reads too slowly, or something else is below (a test, a batch
line), pieces are held and sent by a task, joined. What is held is bounded: a client that does not
read is cut off rather than remembered.

`UntilGone` is how a wait notices that the client has hung up: the protocol calls, nobody listens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Protocol

from starlette.types import Message, Receive, Scope, Send

from ridgeline.serve.errors import ClientGone
from ridgeline.serve.http.native_writer import Lent

MAX_HELD_BYTES = 1 << 20
"""Of one stream, beyond what its socket has taken."""

CONNECTION = "ridgeline.connection"
"""Where a scope keeps its `Connection`, if it has one."""

ADDED_HEADERS = "ridgeline.added_headers"
"""Where a scope keeps what the guard adds to the headers of its answer."""


class Connection(Protocol):
    """What an answer may do to the connection it is on."""

    @property
    def has_begun(self) -> bool:
        """The head of the answer has been sent."""
        ...

    @property
    def has_whole_body(self) -> bool:
        """All of the request has come: reading it waits for nobody."""
        ...

    def begin(self, start: Callable[[], Awaitable[None]], data: bytes) -> bool:
        """Run `start`, which sends the head, and write it and a chunk of the body in one; False
        where it must wait its turn."""
        ...

    def write_chunk(self, data: bytes) -> bool:
        """Write a chunk of the body at once; False where it must wait its turn."""
        ...

    def lend(self, start: Message, lost: Callable[[], None]) -> Lent | None:
        """Its socket, for somebody who writes the head that `start` would open the answer with and
        chunks behind it, until `take_back`; None where that must wait. `lost` is called before the
        socket is closed, should that come first."""
        ...

    def take_back(self, start: Callable[[], Awaitable[None]] | None, left: bytes) -> None:
        """Nobody else writes any more. With `start`, which would have sent the head: the answer has
        begun, and `left` is still to be written."""
        ...

    def cut(self) -> None:
        """End it now, whatever has not been sent."""
        ...

    def watch(self, gone: Callable[[], None] | None) -> None:
        """Call `gone` once the client has hung up, soon if it has already; None: nobody cares."""
        ...


def connection_of(scope: Scope) -> Connection | None:
    """The connection under a request, where the server's own protocol is."""
    found: Connection | None = (scope.get("extensions") or {}).get(CONNECTION)
    return found


class Outlet:
    """See the head of this file. `start` is the message that opens the answer."""

    def __init__(self, send: Send, connection: Connection | None, start: Message) -> None:
        self._send, self._connection, self._start = send, connection, start
        self._held: list[bytes] = []
        self._num_held = 0
        self._is_over = self._is_full = self._is_lent = False
        self._sending: asyncio.Task[None] | None = None
        self.has_begun = False

    def put(self, data: bytes) -> None:
        """The next piece; the first opens the answer, even an empty one. ClientGone where the
        client does not read, and there is no connection to cut."""
        if self._is_full or (self.has_begun and not data):
            return
        if self._sending is None and self._write(data):
            return
        self._hold(data)
        if self._num_held > MAX_HELD_BYTES:
            self._is_full, self._held = True, []
            if self._connection is None:
                raise ClientGone
            self._connection.cut()

    def lend(self, lost: Callable[[], None]) -> Lent | None:
        """See `Connection`; nothing is put before it is taken back."""
        if self._connection is None:
            return None
        lent = self._connection.lend(self._start, lost)
        self._is_lent = lent is not None
        return lent

    def take_back(self, left: bytes, *, has_begun: bool) -> None:
        """Pieces come here from now on. `has_begun`: the answer, of which `left` is not sent."""
        self._is_lent, self.has_begun = False, has_begun
        if self._connection is not None:
            start = partial(self._send, self._start) if has_begun else None
            self._connection.take_back(start, left)

    async def end(self, data: bytes) -> None:
        """The last piece: it goes with the end of the body, in one write. All is on its way when
        this returns."""
        self._is_over = True
        self._held.append(data)
        await (self._send_held() if self._sending is None else self._sending)

    async def close(self) -> None:
        """Whatever has not been sent is dropped."""
        if self._is_lent and self._connection is not None:
            self._connection.take_back(None, b"")
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    def _write(self, data: bytes) -> bool:
        """Straight to the connection, if there is one that takes it."""
        connection = self._connection
        if connection is None:
            return False
        if self.has_begun:
            return connection.write_chunk(data)
        self.has_begun = connection.begin(partial(self._send, self._start), data)
        return self.has_begun

    def _hold(self, data: bytes) -> None:
        self._held.append(data)
        self._num_held += len(data)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_held())

    async def _send_held(self) -> None:
        """Until nothing is held."""
        if not self.has_begun:
            self.has_begun = True
            await self._send(self._start)
        while self._held:
            is_over, data = self._is_over, b"".join(self._held)
            self._held, self._num_held = [], 0
            body = {"type": "http.response.body", "body": data, "more_body": not is_over}
            await self._send(body)
        self._sending = None


class UntilGone:
    """`async with UntilGone(scope, receive)`: what is awaited within is cancelled when the client
    hangs up, and ClientGone is raised. The request's body must have been read.

    As `asyncio.timeout` does it, and as cheap: no task beside the one that serves the request,
    where the server's own protocol is below. Elsewhere a task listens for the disconnect.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._connection, self._receive = connection_of(scope), receive
        self._listener: asyncio.Task[None] | None = None
        self._is_gone = self._is_over = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._before = task, task.cancelling()
        if self._connection is not None:
            self._connection.watch(self._gone)
        else:
            self._listener = asyncio.create_task(self._listen())

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _at: TracebackType | None,
    ) -> None:
        self._is_over = True
        if self._connection is not None:
            self._connection.watch(None)
        if self._listener is not None:
            self._listener.cancel()
        is_ours = self._is_gone and self._task.uncancel() <= self._before
        if is_ours and kind is asyncio.CancelledError:
            raise ClientGone from None

    def _gone(self) -> None:
        if not self._is_over:
            self._is_gone = True
            self._task.cancel()

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone()
