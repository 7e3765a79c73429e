"""A stream's tokens on the short way: from the engine's thread to the socket, without the loop.

Most tokens of most streams are told by their text alone, between two lines that never change. That
takes no Python: the engine's thread hands their texts to a native courier (`native/courier.h`), and
the courier's own thread sends them while the engine plans its next step and a core is idle. The
event loop hears only how a request begins and ends. At 32 streams it would else run for a millisecond
of every step, at the expense of a thread that computes.

An `Errand` is one stream on that way. It ends, once, where the loop has to take over: with the last
token, where the engine fails, where the client has gone, where its socket is full. What was added
and not sent is then handed back, so that whatever follows stands behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from ridgeline.serve.metrics.histogram import Buckets

if TYPE_CHECKING:
    from ridgeline._native import Courier
    from ridgeline._native import Errand as Handle


class Around(msgspec.Struct, frozen=True):
    """What stands around the texts of a stream with one choice: what opens it, and the two ends of
    the event of every token."""

    opening: bytes
    head: bytes
    tail: bytes


class Lent(msgspec.Struct, frozen=True):
    """A socket whose next bytes are somebody else's to write, and the head of its answer."""

    descriptor: int
    head: bytes


class Carried(msgspec.Struct, frozen=True):
    """What went the short way: how many tokens, and when the first and the last of them were handed
    to the connection."""

    num_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0


class Errand:
    """See the head of this file. `handle` is the engine's to fill.

    `look` is called before numbers are read; `stuck` where the socket takes no more, or is broken.
    """

    def __init__(self, handle: Handle, live: dict[Errand, None]) -> None:
        self.handle, self._live = handle, live
        self._left: bytes | None = None
        self.look: Callable[[], None] = _nothing
        self.stuck: Callable[[], None] = self.stop
        live[self] = None

    def seen(self) -> Carried:
        """What was sent so far."""
        return Carried(*self.handle.seen())

    def stop(self) -> None:
        """When this returns nobody writes to the socket, and nobody will."""
        if self._left is None:
            self._left = self.handle.end()
            del self._live[self]

    def end(self) -> tuple[Carried, bytes]:
        """What was carried, and what is left to send of it."""
        self.stop()
        left, self._left = self._left, b""
        return self.seen(), left or b""


class Couriers:
    """The courier of the loop that streams run on, and what it has counted.

    `publish`, `gaps`: where its observations belong; `count`: hears of tokens that were sent.
    """

    def __init__(self, publish: Buckets, gaps: Buckets, count: Callable[[int], None]) -> None:
        self._publish, self._gaps, self._count = publish, gaps, count
        self._live: dict[Errand, None] = {}
        self._courier: Courier | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def take(self, lent: Lent, around: Around, interval: int) -> Errand | None:
        """On the loop. `interval`: tokens that go together. None without native code."""
        courier = self._here()
        if courier is None:
            return None
        opening = lent.head + (chunk(around.opening) if around.opening else b"")
        handle = courier.take(lent.descriptor, opening, around.head, around.tail, interval)
        return Errand(handle, self._live)

    def drain(self) -> None:
        """Bring the numbers up to date."""
        for errand in list(self._live):
            errand.look()
        if self._courier is None:
            return
        num_tokens, publish, publish_s, gaps, gaps_s = self._courier.drain()
        self._count(num_tokens)
        _add(self._publish, publish, publish_s)
        _add(self._gaps, gaps, gaps_s)

    def _here(self) -> Courier | None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self.drain()
            self._loop, self._courier = loop, self._made()
            if self._courier is not None:
                loop.add_reader(self._courier.pipe, self._relieve)
        return self._courier

    def _made(self) -> Courier | None:
        try:
            from ridgeline._native import Courier
        except ImportError:
            return None
        bounds = list(self._publish.bounds), list(self._gaps.bounds)
        return Courier(time.perf_counter(), *bounds)

    def _relieve(self) -> None:
        """Some errand is stuck."""
        assert self._courier is not None
        with contextlib.suppress(BlockingIOError):
            os.read(self._courier.pipe, 4096)
        for errand in [errand for errand in self._live if errand.handle.is_stuck]:
            errand.stuck()


def chunk(data: bytes) -> bytes:
    """A piece of a body whose length is not known (RFC 9112, 7.1)."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def _add(buckets: Buckets, counts: Sequence[int], total: float) -> None:
    buckets.counts = [one + more for one, more in zip(buckets.counts, counts, strict=True)]
    buckets.total += total


def _nothing() -> None:
    """Nobody reads numbers yet."""
