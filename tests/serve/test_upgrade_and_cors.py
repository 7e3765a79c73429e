"""HTTP as clients speak it: offers of HTTP/2, pages of other origins, byte order marks."""

from __future__ import annotations

import json
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.serve.app import create_app
from tests.serve.fake_engine import ANSWER, FakeEngine

BODY = json.dumps({"prompt": "a", "max_tokens": 100}).encode()
OFFERS = [
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n",
    b"connection: keep-alive, upgrade\r\nupgrade: h2c\r\n",
    b"UPGRADE: websocket\r\nCONNECTION: Upgrade\r\n",
]


def exchange(url: str, *pieces: bytes, responses: int = 1) -> bytes:
    host, port = urlsplit(url).netloc.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            connection.sendall(piece)
            if len(pieces) > 1:
                time.sleep(0.005)
        received = b""
        while received.count(b'"total_tokens"') < responses:
            part = connection.recv(65536)
            if not part:
                break
            received += part
    return received


def request(offer: bytes) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + offer
    return head + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.mark.parametrize("offer", OFFERS)
def test_offer_of_another_protocol_is_served_as_http_1(served: str, offer: bytes) -> None:
    whole = request(offer)
    cut = whole.index(b"\r\n\r\n") + 4
    halfway = whole.index(b"pgrade") if b"pgrade" in whole else whole.index(b"PGRADE")
    for pieces in (
        [whole],
        [whole[:cut], whole[cut:]],
        [whole[:halfway], whole[halfway : cut - 2], whole[cut - 2 :]],
        [bytes([byte]) for byte in whole],
    ):
        received = exchange(served, *pieces)
        assert received.startswith(b"HTTP/1.1 200 "), received
        text = received.decode("utf-8", "replace")
        assert json.loads(text[text.index("{") :])["choices"][0]["text"] == ANSWER


def test_connection_stays_usable_after_an_offer(served: str) -> None:
    received = exchange(served, request(OFFERS[0]), request(b""), responses=2)
    assert received.count(b"HTTP/1.1 200 ") == 2
    pipelined = exchange(served, request(b"") + request(b""), responses=2)
    assert pipelined.count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost/health", "evil.example", 200),  # the Host header is ignored
        ("http://LOCALHOST:80/health?a=/b", "localhost", 200),
        ("http://[::1]/health", "localhost", 200),
        ("http://localhost", "localhost", 200),  # no path: the page
        ("http://evil.example/health", "localhost", 403),
        ("http://me@localhost/health", "localhost", 400),
        ("ftp://localhost/health", "localhost", 400),
        ("http:///health", "localhost", 400),
        ("/health", "localhost:", 200),
        ("/health", "x:abc", 400),
        ("/health", "localhost:80:80", 400),
        ("/health", "local host", 400),
        ("/health", "[::1", 400),
        ("/health", "evil.example", 403),
        ("/health", None, 400),
    ],
)
def test_host_of_a_request_is_that_of_its_target_or_header(
    served: str, target: str, host: str | None, status: int
) -> None:
    """RFC 9112, 3.2: a target in absolute form decides; a missing or invalid Host is a 400."""
    named = "" if host is None else f"Host: {host}\r\n"
    request = f"GET {target} HTTP/1.1\r\n{named}Connection: close\r\n\r\n"
    assert exchange(served, request.encode()).split(b" ")[1] == b"%d" % status


def test_probe_in_http_1_0_needs_no_host(served: str) -> None:
    """As HAProxy's `option httpchk` sends it."""
    received = exchange(served, b"GET /health HTTP/1.0\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 200 "), received


ORIGIN = "https://app.example"


async def test_preflight_allows_whatever_headers_a_client_sends() -> None:
    app = create_app(FakeEngine(), ServerOptions(allowed_origins=ORIGIN))
    asked = "authorization,content-type,x-stainless-arch,anthropic-version,x-ridgeline-slo"
    preflight = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": asked,
        "access-control-request-private-network": "true",
    }
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        reply = await http.options("/v1/messages", headers=preflight)
        body = {"prompt": "a", "foo": 1}
        answer = await http.post("/v1/completions", json=body, headers={"origin": ORIGIN})
        refused = await http.options(
            "/v1/messages", headers=preflight | {"origin": "https://evil.example"}
        )
        own = await http.post("/v1/completions", json=body)
    assert reply.status_code == 204 and reply.headers["access-control-allow-headers"] == asked
    assert reply.headers["access-control-allow-private-network"] == "true"
    assert "access-control-request-headers" in reply.headers.get_list("vary", split_commas=True)
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "x-ridgeline-ignored-fields"} <= set(exposed)
    assert refused.status_code == 403 and "access-control-allow-headers" not in refused.headers
    assert "access-control-expose-headers" not in own.headers


async def test_byte_order_mark_of_a_body_is_ignored(http: httpx.AsyncClient) -> None:
    reply = await http.post("/v1/completions", content=b"\xef\xbb\xbf" + BODY)
    assert reply.status_code == 200 and reply.json()["choices"][0]["text"] == ANSWER
