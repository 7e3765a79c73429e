"""What a step has to say to many connections, sent in one go.

A write to a socket gives the interpreter's lock up and wants it back. With the engine's thread in
want of it too, every write of a step's tokens waits for a turn: 64 µs each at 32 streams, of which
16 are work. Here the pieces of one turn of the loop are gathered, and native code sends them all
with the lock given up once. What a socket does not take, and whatever goes wrong, is its
transport's business as ever: it is handed the rest.

Order: a connection's pieces are joined; who writes to its transport by itself does so in a later
turn of the loop (the end of an answer), or has written before (its head).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cached_property

Pieces = tuple[tuple[int, bytes], ...]
"""Descriptors, and what to send to each."""


class Post:
    """For the connections of one loop: plain sockets, each with its transport."""

    def __init__(self) -> None:
        self._due: dict[asyncio.Transport, bytes] = {}

    def add(self, transport: asyncio.Transport, data: bytes) -> None:
        """Send `data` before anything is done that is not yet on the loop's list."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._send)
        before = self._due.get(transport)
        self._due[transport] = data if before is None else before + data

    def _send(self) -> None:
        due, self._due = self._due, {}
        free: list[asyncio.Transport] = []
        for transport, data in due.items():
            if transport.is_closing():
                continue  # its descriptor may be another's by now
            if len(due) == 1 or transport.get_write_buffer_size():
                transport.write(data)
            else:
                free.append(transport)
        if free:
            pieces = [(each.get_extra_info("socket").fileno(), due[each]) for each in free]
            for transport, num in zip(free, self._each(tuple(pieces)), strict=True):
                if num < len(due[transport]):
                    transport.write(due[transport][max(0, num) :])

    @cached_property
    def _each(self) -> Callable[[Pieces], Sequence[int]]:
        """How many bytes of each piece were taken, or an error below 0. Looked for when it is
        needed first: by then torch has brought the OpenMP that native code is to share."""
        try:
            from ridgeline._native import send_each
        except ImportError:  # an engine without native code: transports send by themselves
            return _none_of_each
        return send_each


def _none_of_each(pieces: Pieces) -> Sequence[int]:
    return [0] * len(pieces)
