"""Clients that request and never read: what waits for them is bounded, and then they are cut off."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from ridgeline.records import Event, Finished, Sampling, Token, Usage
from ridgeline.serve.app import create_app
from ridgeline.serve.config import ServerOptions
from ridgeline.serve.errors import ClientGone
from ridgeline.serve.http import stream_writer
from ridgeline.serve.http.native_writer import Lent
from tests.serve.conftest import running
from tests.serve.fake_engine import FakeEngine, sent_off

LINE, PER_STEP, NUM_STEPS = "x" * 1000, 100, 200  # 20 MB: more than any socket takes


class Wordy(FakeEngine):
    """Answers with far more than a client that does not read can be sent."""

    num_steps = 0
    line, per_step, to_come = LINE, PER_STEP, NUM_STEPS

    async def listen(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        sink: Callable[[Sequence[Event]], None],
        *,
        errand: Any = None,
        **terms: Any,
    ) -> Callable[[], None]:
        name, sink = terms["request_id"], sent_off(errand, sink)

        async def talk() -> None:
            token = Token(request_id=name, index=0, token=5, text=self.line, at_s=0.0)
            for _ in range(self.to_come):
                sink([token] * self.per_step)
                self.num_steps += 1
                await asyncio.sleep(0.001)
            usage = Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1)
            sink([Finished(request_id=name, index=0, reason="stop", at_s=0.0, usage=usage)])

        task = asyncio.create_task(talk())

        def leave() -> None:
            if task.cancel():
                self.abort(name)

        return leave


class InPieces(Wordy):
    """As much in few pieces: a whole answer is put together of them."""

    line, per_step, to_come = LINE * (PER_STEP * NUM_STEPS // 4), 1, 4


def ask(url: str, *, stream: bool, buffer_bytes: int = 4096) -> socket.socket:
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


def test_a_stream_that_nobody_reads_is_aborted() -> None:
    engine = Wordy()
    options = ServerOptions(send_timeout_s=60)
    with running(create_app(engine, options), options) as url, ask(url, stream=True):
        deadline = time.monotonic() + 20
        while not engine.aborted and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.aborted and engine.num_steps < NUM_STEPS


def rest_of(connection: socket.socket, *, pause_s: float, most: int = 1 << 20) -> int:
    """Bytes that still come, taken with a pause before each piece, until the end or a reset."""
    size = 0
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(most):
            size += len(piece)
            time.sleep(pause_s)
    return size


def test_a_whole_answer_that_nobody_reads_is_cut_off() -> None:
    engine, options = InPieces(), ServerOptions(send_timeout_s=0.3)
    whole = len(LINE) * PER_STEP * NUM_STEPS
    with running(create_app(engine, options), options) as url, ask(url, stream=False) as lazy:
        with ask(url, stream=False, buffer_bytes=1 << 20) as keen:
            assert rest_of(keen, pause_s=0.0) > whole
        time.sleep(1.0)  # of the first nothing was read since
        assert rest_of(lazy, pause_s=0.0) < whole / 2
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_whole_answer_that_is_read_slowly_arrives() -> None:
    engine, options = InPieces(), ServerOptions(send_timeout_s=0.5)
    whole = len(LINE) * PER_STEP * NUM_STEPS
    with (
        running(create_app(engine, options), options) as url,
        ask(url, stream=False, buffer_bytes=1 << 18) as slow,
    ):
        # more than one look of the clock, each of which finds less than the one before
        assert rest_of(slow, pause_s=0.03) > whole


START = {"type": "http.response.start", "status": 200, "headers": []}


class Line:
    """A connection that takes pieces while it has room."""

    def __init__(self, *, room: bool) -> None:
        self.room, self.num_cuts = room, 0
        self.sent: list[bytes] = []

    def begin(self, start: Callable[[], Awaitable[None]], data: bytes) -> bool:
        return self.write_chunk(b"head" + data)

    def write_chunk(self, data: bytes) -> bool:
        if self.room:
            self.sent.append(data)
        return self.room

    def cut(self) -> None:
        self.num_cuts += 1

    def watch(self, gone: Callable[[], None] | None) -> None:
        raise AssertionError

    def lend(self, start: Any, lost: Callable[[], None]) -> Lent | None:
        return None

    def take_back(self, start: Callable[[], Awaitable[None]] | None, left: bytes) -> None:
        raise AssertionError


async def test_what_is_put_while_the_client_is_slow_keeps_its_order() -> None:
    line, gate = Line(room=True), asyncio.Event()

    async def send(message: Any) -> None:
        await gate.wait()
        line.sent.append(message["body"])

    body = stream_writer.Outlet(send, line, START)
    body.put(b"1")
    line.room = False
    body.put(b"2")
    await asyncio.sleep(0)
    line.room = True  # but 2 is still on its way
    body.put(b"3")
    gate.set()
    await asyncio.sleep(0.01)
    body.put(b"4")
    await body.end(b"5")
    assert b"".join(line.sent) == b"head12345" and line.sent[0] == b"head1"


@pytest.mark.parametrize("room", [True, False])
async def test_the_first_piece_takes_the_head_along_or_waits_with_it(room: bool) -> None:
    line, sent = Line(room=room), list[Any]()

    async def send(message: Any) -> None:
        sent.append(message)

    body = stream_writer.Outlet(send, line, START)
    assert not body.has_begun
    body.put(b"")
    body.put(b"1")
    await body.end(b"2")
    assert body.has_begun and line.sent == ([b"head", b"1"] if room else [])
    rest = b"2" if room else b"12"
    whole = {"type": "http.response.body", "body": rest, "more_body": False}
    assert sent == ([whole] if room else [START, whole])


async def test_an_outlet_that_is_closed_sends_no_more() -> None:
    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    body = stream_writer.Outlet(send, None, START)
    body.put(b"1")
    await asyncio.sleep(0)
    await body.close()
    assert len(asyncio.all_tasks()) == 1


async def test_what_is_held_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_writer, "MAX_HELD_BYTES", 10)

    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    line = Line(room=False)
    body = stream_writer.Outlet(send, line, START)
    for _ in range(9):
        body.put(b"four")
    assert line.num_cuts == 1
    await body.close()
    nobody = stream_writer.Outlet(send, None, START)
    with pytest.raises(ClientGone):
        for _ in range(9):
            nobody.put(b"four")
    await nobody.close()


async def test_whoever_waits_is_told_that_the_client_has_gone() -> None:
    gone: list[Callable[[], None] | None] = []

    class Watched(Line):
        def watch(self, call: Callable[[], None] | None) -> None:
            gone.append(call)

    async def receive() -> Any:
        raise AssertionError("nobody listens where the connection tells")

    scope: Any = {"extensions": {stream_writer.CONNECTION: Watched(room=True)}}
    with pytest.raises(ClientGone):
        async with stream_writer.UntilGone(scope, receive):
            (call,) = gone
            assert call is not None
            asyncio.get_running_loop().call_soon(call)
            await asyncio.Event().wait()
    assert gone[1] is None
    call()  # too late: the answer is out
    await asyncio.sleep(0)


@pytest.mark.parametrize("gone", [True, False])
async def test_without_a_connection_somebody_listens(gone: bool) -> None:
    async def receive() -> Any:
        if not gone:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    told = pytest.raises(ClientGone) if gone else contextlib.nullcontext()
    with told:
        async with stream_writer.UntilGone({}, receive):
            await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


async def test_whoever_cancels_from_outside_is_not_told_of_the_client() -> None:
    async def wait() -> None:
        async with stream_writer.UntilGone({}, asyncio.Event().wait):  # type: ignore[arg-type]
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
