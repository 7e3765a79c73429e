"""Clients that do not read their response: their backlog is bounded, then they are cut off."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.records import Event, Finished, Sampling, Token, Usage
from ridgeline.serve.app import create_app
from ridgeline.serve.errors import ClientDisconnected
from ridgeline.serve.generation.disconnect import cancel_on_disconnect
from tests.serve.conftest import running
from tests.serve.fake_engine import FakeEngine

TEXT, TOKENS_PER_STEP, NUM_STEPS = "x" * 1000, 100, 200  # 20 MB: more than socket buffers hold


class VerboseEngine(FakeEngine):
    """Generates far more text than a client that does not read can be sent."""

    num_steps = 0
    text, tokens_per_step, max_steps = TEXT, TOKENS_PER_STEP, NUM_STEPS

    async def listen(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        sink: Callable[[Sequence[Event]], None],
        **terms: Any,
    ) -> Callable[[], None]:
        name = terms["request_id"]

        async def generate() -> None:
            token = Token(request_id=name, index=0, token=5, text=self.text, at_s=0.0)
            for _ in range(self.max_steps):
                sink([token] * self.tokens_per_step)
                self.num_steps += 1
                await asyncio.sleep(0.001)
            usage = Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1)
            sink([Finished(request_id=name, index=0, reason="stop", at_s=0.0, usage=usage)])

        task = asyncio.create_task(generate())

        def unsubscribe() -> None:
            if task.cancel():
                self.abort(name)

        return unsubscribe


class FewTokensEngine(VerboseEngine):
    """The same amount of text in four tokens, of which a whole response is collected."""

    text, tokens_per_step, max_steps = TEXT * (TOKENS_PER_STEP * NUM_STEPS // 4), 1, 4


def send(url: str, *, stream: bool, buffer_bytes: int = 4096) -> socket.socket:
    """Send a request; its response is not read."""
    host, port = urlsplit(url).netloc.split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    connection.settimeout(10)
    connection.connect((host, int(port)))
    body = json.dumps({"prompt": "hi", "max_tokens": 9, "stream": stream})
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += f"content-length: {len(body)}\r\n"
    connection.sendall((head + "\r\n" + body).encode())
    return connection


def read_rest(connection: socket.socket, *, pause_s: float, max_bytes: int = 1 << 20) -> int:
    """Bytes that can still be read, with a pause after each piece, until the end or a reset."""
    size = 0
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(max_bytes):
            size += len(piece)
            time.sleep(pause_s)
    return size


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_unread_stream_is_aborted_while_the_connection_is_open() -> None:
    engine = VerboseEngine()
    options = ServerOptions(send_timeout_s=60)
    with running(create_app(engine, options), options) as url, send(url, stream=True):
        wait_until(lambda: bool(engine.aborted))
        assert engine.num_steps < NUM_STEPS


def test_stream_of_a_client_that_lagged_ends_with_an_error() -> None:
    """What had accumulated is delivered first, and nothing is missing in between."""
    engine, options = VerboseEngine(), ServerOptions(send_timeout_s=60)
    with running(create_app(engine, options), options) as url, send(url, stream=True) as client:
        wait_until(lambda: bool(engine.aborted))
        data = b""
        while piece := client.recv(1 << 20):
            data += piece
    *chunks, error, done, end = data.split(b"\n\n")
    assert done.endswith(b"data: [DONE]") and end.endswith(b"0\r\n\r\n")
    assert b'"code":408' in error and b"too slowly" in error
    assert all(TEXT.encode() in chunk for chunk in chunks)


def test_unread_stream_is_cut_off_after_the_send_timeout() -> None:
    engine, options = VerboseEngine(), ServerOptions(send_timeout_s=0.3)
    with running(create_app(engine, options), options) as url, send(url, stream=True) as client:
        time.sleep(1.5)
        assert read_rest(client, pause_s=0.0) < len(TEXT) * TOKENS_PER_STEP * NUM_STEPS / 2
        assert httpx.get(f"{url}/health").status_code == 200
    assert engine.aborted


def test_unread_whole_response_is_cut_off() -> None:
    engine, options = FewTokensEngine(), ServerOptions(send_timeout_s=0.3)
    size = len(TEXT) * TOKENS_PER_STEP * NUM_STEPS
    with running(create_app(engine, options), options) as url, send(url, stream=False) as idle:
        with send(url, stream=False, buffer_bytes=1 << 20) as reader:
            assert read_rest(reader, pause_s=0.0) > size
        time.sleep(1.0)  # the first client has read nothing since
        assert read_rest(idle, pause_s=0.0) < size / 2
        assert httpx.get(f"{url}/health").status_code == 200


def test_slowly_read_whole_response_arrives() -> None:
    engine, options = FewTokensEngine(), ServerOptions(send_timeout_s=0.5)
    size = len(TEXT) * TOKENS_PER_STEP * NUM_STEPS
    with (
        running(create_app(engine, options), options) as url,
        send(url, stream=False, buffer_bytes=1 << 18) as slow,
    ):
        # takes longer than several send timeouts, each of which finds that some was read
        assert read_rest(slow, pause_s=0.03) > size


@pytest.mark.parametrize("is_gone", [True, False])
async def test_disconnect_cancels_the_block(is_gone: bool) -> None:
    async def receive() -> Any:
        if not is_gone:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    expected = pytest.raises(ClientDisconnected) if is_gone else contextlib.nullcontext()
    with expected:
        async with cancel_on_disconnect(receive):
            await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


async def test_cancelling_from_outside_is_not_a_disconnect() -> None:
    async def receive() -> Any:
        await asyncio.Event().wait()

    async def wait() -> None:
        async with cancel_on_disconnect(receive):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
