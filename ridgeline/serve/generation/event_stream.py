"""A response of server-sent events."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ridgeline.serve.errors import ApiError, ClientDisconnected, to_api_error
from ridgeline.serve.generation.disconnect import cancel_on_disconnect
from ridgeline.serve.generation.stream import ChoiceUpdate, ResponseStream

log = logging.getLogger("ridgeline.serve")

_STREAM_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
)
_LINE_SEPARATORS = (
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
    ("\u0085".encode(), b"\\u0085"),
)


def to_json(payload: object) -> bytes:
    """JSON of plain builtins."""
    return msgspec.json.encode(payload)


def sse(payload: object) -> bytes:
    """One server-sent event with JSON data."""
    return b"data: " + _one_line(to_json(payload)) + b"\n\n"


def named_sse(name: str, payload: object) -> bytes:
    """One server-sent event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + _one_line(to_json(payload)) + b"\n\n"


def _one_line(text: bytes) -> bytes:
    """JSON without the line separators U+0085, U+2028 and U+2029: server-sent events end lines with
    CR and LF only, but many clients split them as Unicode text."""
    for character, escape in _LINE_SEPARATORS:
        if character in text:
            text = text.replace(character, escape)
    return text


class EventSerializer(Protocol):
    """The events of one endpoint's stream, each as bytes."""

    def open(self) -> bytes:
        """Events that precede the first update."""
        ...

    def events(self, update: ChoiceUpdate) -> bytes: ...

    def close(self) -> bytes:
        """Events that follow the last update."""
        ...

    def error(self, error: ApiError) -> bytes:
        """Events that end a stream that broke."""
        ...


class EventStreamResponse(Response):
    """Writes a `ResponseStream` as server-sent events, one write per batch of updates.

    The response starts with the first batch. An error before it is raised and becomes an error
    response with its own status; a later one becomes the last event. The stream is closed when the
    response ends, for whatever reason.
    """

    def __init__(
        self, stream: ResponseStream, serializer: EventSerializer, headers: Mapping[str, str]
    ) -> None:
        super().__init__(headers=headers)
        self._stream, self._serializer = stream, serializer

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """Omit Content-Length, which Starlette would add: the body is streamed."""
        given = [
            (name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()
        ]
        self.raw_headers = [*given, *_STREAM_HEADERS]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.closing(self._stream), contextlib.suppress(ClientDisconnected):
            async with cancel_on_disconnect(receive):
                await self._write(send)

    async def _write(self, send: Send) -> None:
        stream, serializer = self._stream, self._serializer
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        is_started = False
        try:
            async for updates in stream:
                data = b""
                if not is_started:
                    is_started = True
                    await send(start)
                    data = serializer.open()
                data += b"".join([serializer.events(update) for update in updates])
                # the end of the stream goes out with the last token, in one write
                if is_last := stream.is_finished:
                    data += serializer.close()
                await send({"type": "http.response.body", "body": data, "more_body": not is_last})
        except Exception as error:
            api_error = to_api_error(error)
            if not is_started:
                raise
            if api_error.status_code == 500:
                log.exception("a stream failed")
            end = serializer.error(api_error)
            await send({"type": "http.response.body", "body": end, "more_body": False})
