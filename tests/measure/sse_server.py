"""A tiny OpenAI-compatible server written by hand: three tokens per answer, one of them U+2028."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

DONE = b"data: [DONE]\n\n"


def sse(**body: Any) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def text_chunk(text: str, finish: str | None = None, **more: Any) -> bytes:
    return sse(choices=[{"index": 0, "text": text, "finish_reason": finish}], **more)


def usage(completion: int, prompt: int = 12, cached: int = 4) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class SseServer:
    """Counts its requests; `refuse` makes it answer 503."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.refuse = False
        self.url = ""

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    @classmethod
    @contextmanager
    def in_thread(cls) -> Iterator[SseServer]:
        """Run the server on an event loop in a separate thread."""
        running, up = cls(), threading.Event()
        loop = asyncio.new_event_loop()
        stop = asyncio.Event()

        async def main() -> None:
            async with await running.start():
                up.set()
                await stop.wait()

        thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
        thread.start()
        up.wait(10)
        try:
            yield running
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(10)
            loop.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            _whole(writer, b"200 OK", b'{"data": [{"id": "tiny"}]}')
        else:
            self.num_requests += 1
            await reader.readexactly(_length(head))
            if self.refuse:
                _whole(writer, b"503 Service Unavailable", b"full")
            else:
                await _stream(writer)
        await writer.drain()
        writer.close()
        await writer.wait_closed()


def _length(head: bytes) -> int:
    lines = head.lower().split(b"\r\n")
    return next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:"))


def _whole(writer: asyncio.StreamWriter, status: bytes, body: bytes) -> None:
    fields = (b"Content-Length: %d" % len(body), b"Connection: close")
    writer.write(b"HTTP/1.1 " + status + b"\r\n" + b"\r\n".join(fields) + b"\r\n\r\n" + body)


async def _stream(writer: asyncio.StreamWriter) -> None:
    """Chunked: one token, two events in one chunk, then the end with the usage."""
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
    tail = text_chunk("", "length") + sse(choices=[], usage=usage(3)) + DONE
    for part in (text_chunk("a"), text_chunk("\u2028") + text_chunk("c"), tail):
        writer.write(b"%x\r\n%s\r\n" % (len(part), part))
        await writer.drain()
        await asyncio.sleep(0.005)
    writer.write(b"0\r\n\r\n")
