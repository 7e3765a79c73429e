"""The gateway over servers that break the rules of HTTP, and over URLs that name none."""

from __future__ import annotations

import asyncio
import gzip
import re
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from ridgeline.config.server import CanaryOptions, RouteOptions, ServerOptions
from ridgeline.errors import BadInput
from ridgeline.fleet.app import GatewayService, addresses_of, create_gateway_app
from ridgeline.fleet.backends import Backends
from ridgeline.fleet.upstream import BackendAddress
from ridgeline.routing import make_router
from tests.fleet.scripted import HEAD, ScriptedBackend, answering, chunk, gateway_over

WHOLE = b'{"id":"right"}'
STREAM = b'data: {"t":1}\n\ndata: [DONE]\n\n'
HEADERS = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


def saying(*parts: bytes, ends: bool = True) -> ScriptedBackend:
    """Answers every POST with these bytes, one write each, and then breaks off if it `ends`."""

    async def answer(_: ScriptedBackend, __: Any, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.005)
        if ends:
            raise ConnectionError

    return ScriptedBackend(answer)


async def ask(http: httpx.AsyncClient, *, stream: bool = False) -> httpx.Response:
    body = {"model": "m", "prompt": "x", "stream": stream}
    return await http.post("/v1/completions", json=body, timeout=10)


@pytest.mark.parametrize(
    "parts",
    [
        (b"HTTP/1.1 200 OK\r\ncontent-ty",),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 14\r\n\r\n", WHOLE[:5]),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"ffffffffffffffffff\r\nx"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"-1\r\nx"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200 + b"\r\n",),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", b"xy"),
        (b"SSH-2.0-OpenSSH_9.2\r\n",),
        (b"\x16\x03\x01\x00\x05hello",),
    ],
    ids=lambda parts: repr(parts[-1][:20]),
)
async def test_unfinished_and_unreadable_answers_come_from_another_server(
    parts: Sequence[bytes],
) -> None:
    async with gateway_over(saying(*parts), answering(WHOLE)) as http:
        for _ in range(2):
            reply = await ask(http)
            assert (reply.status_code, reply.content) == (200, WHOLE)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_interim_responses_are_not_the_answer(is_split: bool, stream: bool) -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n"
    final = HEAD + b"\r\n" + chunk(STREAM) + b"0\r\n\r\n" if stream else HEADERS % 14 + WHOLE
    parts = (interim, final) if is_split else (interim + final,)
    async with gateway_over(saying(*parts, ends=False)) as http:
        for _ in range(2):
            reply = await ask(http, stream=stream)
            assert reply.status_code == 200
            assert reply.content == (STREAM if stream else WHOLE)
            assert "link" not in reply.headers


@pytest.mark.parametrize(
    "parts",
    [
        (HEADERS % 14 + WHOLE + b"\0garbage",),
        (HEADERS % 14 + WHOLE, b"\0garbage"),
        (HEADERS % 14 + WHOLE + HEADERS % 3 + b"bad",),
    ],
    ids=["garbage", "late", "answer"],
)
async def test_bytes_after_an_answer_are_not_the_next_one(parts: Sequence[bytes]) -> None:
    async with gateway_over(saying(*parts, ends=False)) as http:
        for _ in range(4):
            reply = await ask(http)
            assert (reply.status_code, reply.content) == (200, WHOLE)


async def test_compressed_answers_keep_their_encoding() -> None:
    packed = gzip.compress(WHOLE)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\n"
    parts = head + b"content-length: %d\r\n\r\n" % len(packed) + packed
    async with gateway_over(saying(parts, ends=False)) as http:
        reply = await ask(http)
        assert (reply.status_code, reply.content) == (200, WHOLE)


async def test_compressed_streams_come_whole() -> None:
    packed = gzip.compress(STREAM)
    parts = HEAD + b"content-encoding: gzip\r\n\r\n" + chunk(packed) + b"0\r\n\r\n"
    async with gateway_over(saying(parts, ends=False)) as http:
        reply = await ask(http, stream=True)
        assert (reply.status_code, reply.content) == (200, STREAM)


@pytest.mark.parametrize(
    "url",
    [
        "http://user:password@host:1",
        "http://host:1/?key=1",
        "http://host:1/#part",
        "http://host:0",
        "http://host:99999",
        "http://ho st:1",
        "http://host:1/a b",
        "http://host:1/\r\nx: y",
        "ftp://host",
        "host:1",
        "",
    ],
)
def test_url_that_is_not_that_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(BadInput):
        BackendAddress.parse(url)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:9", "refused|Connect"),
        ("http://no.such.host.invalid:8000", "no connection"),
    ],
)
async def test_server_that_never_answers_is_reported_once(
    url: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    backends = Backends([BackendAddress.parse(url)], make_router("round-robin"))
    for _ in range(2):
        await backends._probe(backends.all[0])
    (message,) = [record.getMessage() for record in caplog.records]
    assert url in message and re.search(why, message)


async def test_web_server_that_is_no_backend_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    is_closed = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()
        is_closed.set()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        backends = Backends([BackendAddress.parse(url)], make_router("round-robin"))
        for _ in range(2):
            await backends._probe(backends.all[0])
        backends.all[0].close()
        await asyncio.wait_for(is_closed.wait(), 10)
    assert backends.all[0].state == "starting"
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == f"backend {url} is no server of an OpenAI API: /health answers 404"


def test_server_may_not_be_compared_with_itself() -> None:
    url = "http://127.0.0.1:8000"
    with pytest.raises(BadInput, match="both --backend and --canary"):
        create_gateway_app(
            RouteOptions(backend=(url,)),
            GatewayService(ServerOptions()),
            CanaryOptions(canary=(url + "/",)),
        )


def test_server_that_is_named_twice_is_one_backend() -> None:
    (address,) = addresses_of(("http://host:1", "http://host:1/", "HTTP://HOST:1"))
    assert str(address) == "http://host:1"


def test_path_of_a_url_precedes_every_path() -> None:
    address = BackendAddress.parse("https://host/a/b/")
    assert (address.port, address.tls, address.prefix) == (443, True, "/a/b")
