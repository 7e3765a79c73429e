"""Clients that are slow, flood the server or never finish a request; and graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.serve.app import create_app
from ridgeline.serve.server import uvicorn_config
from tests.serve.conftest import running
from tests.serve.fake_engine import ANSWER, FakeEngine
from tests.serve.test_server_process import SERVER

QUICK = {"header_timeout_s": 0.3, "body_timeout_s": 0.3, "max_num_connections": 20}


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    options = ServerOptions(**QUICK)
    with running(create_app(engine, options), options) as url:
        yield url


def connect(url: str) -> socket.socket:
    host, port = urlsplit(url).netloc.split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def read_all(connection: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: loc"])
def test_incomplete_headers_time_out(url: str, sent: bytes) -> None:
    with connect(url) as connection:
        connection.sendall(sent)
        began = time.monotonic()
        assert read_all(connection).startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - began < 5


def test_header_timeout_is_not_extended_by_dripping_bytes(url: str) -> None:
    with connect(url) as connection:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            for byte in b"GET /health HTTP/1.1\r\n" * 40:
                connection.sendall(bytes([byte]))
                time.sleep(0.01)
        assert time.monotonic() - began < 5


def test_endless_header_is_not_buffered(url: str) -> None:
    with connect(url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nx: ")
        with contextlib.suppress(OSError):
            for _ in range(64):
                connection.sendall(b"y" * 65536)
    assert httpx.get(f"{url}/health").status_code == 200


def test_incomplete_body_times_out(url: str, engine: FakeEngine) -> None:
    with connect(url) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n\r\n{"
        )
        assert read_all(connection).startswith(b"HTTP/1.1 408 ")
    assert not engine.requests


def test_large_body_is_refused_before_it_is_sent(url: str) -> None:
    with connect(url) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999\r\n\r\n"
        )
        assert read_all(connection).startswith(b"HTTP/1.1 413 ")
    chunked = httpx.post(f"{url}/v1/completions", content=(b"x" * 65536 for _ in range(80)))
    assert chunked.status_code == 413


def test_client_that_sends_a_large_body_still_reads_the_413(url: str) -> None:
    body = b"x" * (30 << 20)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    with connect(url) as connection:
        for _ in range(2):  # the connection stays open
            connection.sendall(head % len(body) + body)
            assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_body_that_drips_on_after_the_response_is_cut_off(url: str) -> None:
    drip = b"2\r\nxx\r\n"
    head = b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    with connect(url) as connection:
        connection.sendall(head + drip)
        assert connection.recv(65536).startswith(b"HTTP/1.1 404 ")
        began = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - began < 8:
                connection.sendall(drip)
                time.sleep(0.05)
        assert time.monotonic() - began < 5


def test_connections_over_the_limit_get_503(url: str) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(20):
            held.enter_context(connect(url))
        time.sleep(0.05)
        extra = held.enter_context(connect(url))
        assert read_all(extra).startswith(b"HTTP/1.1 503 ")
    time.sleep(0.05)
    assert httpx.get(f"{url}/health").status_code == 200


async def test_requests_in_progress_are_limited(engine: FakeEngine) -> None:
    """A client that disconnects frees its connection at once, but its request only later."""
    app = create_app(engine, ServerOptions(max_num_connections=2))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        stuck = [
            asyncio.create_task(http.post("/v1/completions", json={"prompt": "!stuck"}))
            for _ in range(2)
        ]
        await asyncio.sleep(0.05)
        refused = await http.get("/health")
        assert refused.status_code == 503 and "retry-after" in refused.headers
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        assert (await http.get("/health")).status_code == 200


def test_dripping_blank_lines_between_requests_is_cut_off(url: str) -> None:
    """uvicorn's keep-alive timeout starts again with every byte."""
    with connect(url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        began = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - began < 8:
                connection.sendall(b"\r\n")
                time.sleep(0.05)
        assert time.monotonic() - began < 5


def test_upgrade_requests_are_answered_as_plain_ones(url: str) -> None:
    with connect(url) as connection:
        connection.sendall(
            b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\n"
            b"upgrade: h2c\r\n\r\n"
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"x" * 1000)  # what follows is not read


def test_pipelined_requests_are_answered_in_order(url: str) -> None:
    paths = ("/version", "/health", "/nowhere")
    with connect(url) as connection:
        connection.sendall(
            b"".join(b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % p.encode() for p in paths)
        )
        data = b""
        while data.count(b"HTTP/1.1 ") < 3:
            data += connection.recv(65536)
    statuses = [part[:3] for part in data.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"200", b"404"]


def test_bytes_that_are_not_http_get_a_json_error(url: str) -> None:
    with connect(url) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body)["error"]["code"] == 400


def test_keep_alive_still_works(url: str) -> None:
    with httpx.Client(base_url=url) as http:
        for _ in range(3):
            assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
            time.sleep(0.4)  # longer than the header timeout, which does not apply between requests


@pytest.fixture
def process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", SERVER, "20"]
    env = {**os.environ, "PYTHONPATH": os.getcwd()}  # noqa: PTH109
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


@pytest.mark.slow
def test_draining_server_finishes_requests_and_refuses_new_ones(
    process: tuple[subprocess.Popen[str], str],
) -> None:
    server, url = process
    body = {"prompt": "!slow", "max_tokens": 38, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as reply:
        lines = (line for line in reply.iter_lines() if line)
        next(lines)
        server.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        ready = httpx.get(f"{url}/ready")
        assert ready.status_code == 503 and int(ready.headers["retry-after"]) >= 1
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 503
        assert list(lines)[-1] == "data: [DONE]"
    assert server.wait(timeout=10) == 0


@pytest.mark.slow
def test_second_signal_stops_at_once(process: tuple[subprocess.Popen[str], str]) -> None:
    server, url = process

    def send() -> None:
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{url}/v1/completions", json={"prompt": "!stuck"})

    client = threading.Thread(target=send)
    client.start()
    time.sleep(0.2)
    began = time.monotonic()
    server.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=10) == 0
    assert time.monotonic() - began < 8
    client.join()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_http_1_0_clients_get_no_chunked_encoding(url: str, version: str, stream: bool) -> None:
    """A response without chunks needs a length (RFC 9112, 6.3)."""
    body = json.dumps({"prompt": "!slow", "max_tokens": 12, "stream": stream}).encode()
    with connect(url) as connection:
        head = f"POST /v1/completions HTTP/{version}\r\nhost: localhost\r\nconnection: close\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        headers, _, sent = read_all(connection).partition(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.1 200 ") and b"connection: close" in headers
    is_chunked = b"transfer-encoding: chunked" in headers
    assert is_chunked == (stream and version == "1.1")
    if stream and not is_chunked:
        *events, done, end = sent.split(b"\n\n")
        assert (done, end) == (b"data: [DONE]", b"")
        choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
        assert "".join(choice["text"] for choice in choices) == ANSWER[:12]
        assert len(choices) == 12


def test_uvloop_is_used_where_it_is_installed() -> None:
    async def app(*_: object) -> None: ...

    assert uvicorn_config(app, ServerOptions()).loop == "auto"  # uvicorn's word for it
