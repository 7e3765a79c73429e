"""Incremental parser of server-sent events.

Lines end at \\n only (a preceding \\r is dropped): str.splitlines would also split at U+2028,
U+2029 and U+0085, which are legal inside a JSON string. A line that starts with `:` is a comment (a
keep-alive ping); `data:` may or may not be followed by a space; data lines of one event are joined
with \\n; an empty line ends the event. A read may contain several events, or part of one.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class ServerEvent(msgspec.Struct, frozen=True):
    """One event: its `data`, and its `event` field ("" if the server sent none)."""

    data: bytes
    kind: str = ""


class SseParser:
    """Yields the events that are completed by each read of the socket."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # the reads since the last newline
        self._data: list[bytes] = []
        self._kind = ""

    def feed(self, received: bytes) -> Iterator[ServerEvent]:
        self._rest.append(received)
        if b"\n" not in received:  # joined once: a line may come in thousands of reads
            return
        *lines, rest = b"".join(self._rest).split(b"\n")
        self._rest = [rest]
        for line in lines:
            event = self._line(line.removesuffix(b"\r"))
            if event is not None:
                yield event

    def close(self) -> Iterator[ServerEvent]:
        """End of the stream: an event without its closing empty line still counts."""
        yield from self.feed(b"\n\n" if any(self._rest) else b"\n")

    def _line(self, line: bytes) -> ServerEvent | None:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._kind = value.decode("utf-8", "replace")
        return None  # a comment has an empty name; id and retry are not needed

    def _dispatch(self) -> ServerEvent | None:
        data, kind = self._data, self._kind
        self._data, self._kind = [], ""
        return ServerEvent(b"\n".join(data), kind) if data else None
