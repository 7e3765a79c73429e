"""Tokens that a native thread sends: the same bytes in the same order, whoever takes over when."""

from __future__ import annotations

import json
import random
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ridgeline._native import Courier
from ridgeline.engine.engine import Engine
from ridgeline.serve.app import create_app
from ridgeline.serve.config import ServerOptions
from ridgeline.serve.http import native_writer as short_way
from ridgeline.serve.http.native_writer import chunk
from ridgeline.serve.metrics.histogram import Buckets
from tests.serve.conftest import running
from tests.serve.fake_engine import ANSWER, FakeEngine

BOUNDS = [0.001, 0.1, 10.0]
ALPHABET = [*map(chr, range(0x80)), "é", "\u2028", "\ud7ff", "\ufffd", "😀", "\U0010ffff"]


def made() -> Courier:
    return Courier(time.perf_counter(), BOUNDS, BOUNDS)


def text_of(rng: random.Random, most: int = 12) -> str:
    return "".join(rng.choices(ALPHABET, k=rng.randint(0, most)))


def piece(text: str) -> bytes:
    return chunk(b'{"a":' + msgspec.json.encode(text) + b"}\n")


def take(courier: Courier, number: int, opening: bytes = b"", interval: int = 1):  # type: ignore[no-untyped-def]
    return courier.take(number, opening, b'{"a":', b"}\n", interval)


def received(far: socket.socket, num_bytes: int) -> bytes:
    far.settimeout(10)
    found = b""
    while len(found) < num_bytes:
        found += far.recv(1 << 16)
    return found


def test_texts_are_written_as_msgspec_writes_them() -> None:
    rng, courier = random.Random(7), made()
    near, far = socket.socketpair()
    with near, far:
        errand = take(courier, near.fileno(), b"head")
        texts = [*ALPHABET, "", *(text_of(rng, 200) for _ in range(300))]
        wanted = b"head" + b"".join(map(piece, texts))
        for text in texts:
            assert errand.add(text, 0.0)
        errand.go()
        assert received(far, len(wanted)) == wanted
        assert errand.add("\ud800", 0.0)  # no text that JSON could hold
        assert errand.end() == piece("\ufffd")
        assert not errand.add("late", 0.0) and errand.end() == b""


def test_the_opening_alone_is_nothing_to_send() -> None:
    courier = made()
    near, far = socket.socketpair()
    with near, far:
        errand = take(courier, near.fileno(), b"head")
        errand.go()
        assert errand.end() == b"" and errand.seen() == (0, 0.0, 0.0)
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            far.recv(1)


def test_first_tokens_go_before_all_others() -> None:
    courier = made()
    near, far = socket.socketpair()
    with near, far:  # one socket for all of them tells who was sent when
        streams = [take(courier, near.fileno(), b"open %d " % number) for number in range(5)]
        for stream in streams[:3]:
            stream.add("first", 0.0)
            stream.go()
            received(far, 7 + len(piece("first")))
        for number, stream in enumerate(streams):
            stream.add(f"{number}", 0.0)
        streams[0].go()
        early = b"".join(b"open %d " % number + piece(f"{number}") for number in (3, 4))
        wanted = early + b"".join(piece(f"{number}") for number in range(3))
        assert received(far, len(wanted)) == wanted


class Stream:
    """One errand, a slow reader, and whoever takes over when its socket is full."""

    def __init__(self, courier: Courier, rng: random.Random) -> None:
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.errand = take(courier, self.near.fileno(), b"open", rng.choice((1, 1, 3)))
        self.wanted, self.later = b"open", b""
        self.lags, self.was_stuck = rng.random() < 0.5, False

    def say(self, text: str) -> None:
        self.wanted += piece(text)
        if not self.errand.add(text, time.perf_counter()):
            self.later += piece(text)

    def relieve(self) -> None:
        if self.errand.is_stuck:
            self.was_stuck = True
            self.later = self.errand.end() + self.later

    def finish(self, found: list[bytes]) -> None:
        """Everything that is left, as a transport would write it, while the far end reads."""
        rest = self.errand.end() + self.later if not self.was_stuck else self.later
        reader = threading.Thread(target=lambda: found.append(self._read()))
        reader.start()
        self.near.setblocking(True)
        self.near.sendall(rest)
        self.near.shutdown(socket.SHUT_WR)
        reader.join(timeout=20)

    def _read(self) -> bytes:
        found = b""
        while data := self.far.recv(1 << 16):
            found += data
        return found


def test_random_streams_arrive_whole_and_are_counted_once() -> None:
    rng, courier = random.Random(11), made()
    streams = [Stream(courier, rng) for _ in range(12)]
    read = dict.fromkeys(streams, b"")
    num_tokens = 0
    for _ in range(150):
        for stream in rng.sample(streams, rng.randint(0, 12)):
            for _ in range(rng.choice((1, 1, 1, 4))):
                stream.say(text_of(rng, 90))
                num_tokens += not stream.later
        streams[0].errand.go()
        for stream in streams:
            if select.select([courier.pipe], [], [], 0)[0]:
                stream.relieve()
            if not stream.lags:
                stream.far.setblocking(False)
                with suppress(BlockingIOError):
                    read[stream] += stream.far.recv(1 << 16)
                stream.far.setblocking(True)
    for stream in streams:
        found: list[bytes] = []
        stream.finish(found)
        assert read[stream] + found[0] == stream.wanted
        stream.near.close()
        stream.far.close()
    assert any(stream.was_stuck for stream in streams)
    sent, publish, _, gaps, _ = courier.drain()
    assert sent == num_tokens == sum(publish) == sum(stream.errand.seen()[0] for stream in streams)
    assert sum(gaps) == sum(max(0, stream.errand.seen()[0] - 1) for stream in streams)
    assert courier.drain()[0] == 0


def test_after_the_end_nobody_writes_to_the_descriptor() -> None:
    """Again and again at a random instant of a sending; the number is then another socket's."""
    rng, courier = random.Random(5), made()
    for _ in range(300):
        near, far = socket.socketpair()
        near.setblocking(False)
        errand, number = take(courier, near.fileno()), near.fileno()
        wanted = b""
        for _ in range(rng.randint(1, 6)):
            text = text_of(rng, 300)
            wanted += piece(text)
            errand.add(text, 0.0)
            errand.go()
        if rng.random() < 0.5:
            time.sleep(rng.random() * 2e-4)
        left = errand.end()
        near.close()
        other, end = socket.socketpair()
        assert number in (other.fileno(), end.fileno())
        errand.add("x", 0.0)
        errand.go()
        found = b""
        while data := far.recv(1 << 16):
            found += data
        assert found + left == wanted
        for one in (other, end):
            one.setblocking(False)
            with pytest.raises(BlockingIOError):
                one.recv(1)
        for one in (far, other, end):
            one.close()


def test_tokens_that_are_gathered() -> None:
    """The first goes at once, then three at a time, and the end has the rest."""
    courier = made()
    near, far = socket.socketpair()
    with near, far:
        errand = take(courier, near.fileno(), interval=3)
        texts = list("abcdefgh")
        for number, text in enumerate(texts):
            errand.add(text, 0.0)
            errand.go()
            deadline = time.monotonic() + 5
            due = 1 + number // 3 * 3
            while errand.seen()[0] < due and time.monotonic() < deadline:
                time.sleep(0.0005)
            assert errand.seen()[0] == due
        assert errand.end() == piece("h")
        assert received(far, 7 * len(piece("a"))) == b"".join(map(piece, texts[:7]))


def test_counts_by_bound_as_our_histograms_count() -> None:
    courier, ours = made(), Buckets(tuple(BOUNDS))
    near, far = socket.socketpair()
    with near, far:
        errand = take(courier, near.fileno())
        for age in (-1.0, 0.05, 1.0, 100.0, 1e6):
            errand.add("x", time.perf_counter() - age)
            ours.observe(age)
        errand.end()
    _, publish, total, gaps, _ = courier.drain()
    assert publish == ours.counts and total == pytest.approx(ours.total, rel=1e-3)
    assert gaps == [4, 0, 0, 0]


# -- behind a real server


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open("demo", max_num_seqs=8, dtype="float32") as engine:
        yield engine


COMPLETION = {"prompt": "import os\nimport ", "max_tokens": 21, "temperature": 0, "stream": True}
CHAT = {k: v for k, v in COMPLETION.items() if k != "prompt"}
CHAT |= {"messages": [{"role": "user", "content": "write code"}]}
USAGE = {"stream_options": {"include_usage": True}}
ASKED: list[tuple[str, dict[str, object]]] = [
    ("/v1/completions", COMPLETION | {"ignore_eos": True} | USAGE),
    ("/v1/completions", COMPLETION | {"stop": ["os", "sys"]} | USAGE),
    ("/v1/completions", COMPLETION | {"max_tokens": 1}),
    ("/v1/completions", COMPLETION | {"echo": True}),
    ("/v1/completions", COMPLETION | {"logprobs": 2}),
    ("/v1/chat/completions", CHAT | {"ignore_eos": True} | USAGE),
    ("/v1/chat/completions", CHAT | {"max_tokens": 2}),
]


def raw(url: str, path: str, body: dict[str, object]) -> tuple[list[tuple[str, str]], list[str]]:
    """Headers and events of an answer, without what differs by itself."""
    reply = httpx.post(url + path, json=body | {"request_id": "same"}, timeout=60)
    assert reply.status_code == 200
    text = re.sub(r'"id":"[^"]*"|"created":\d+', "", reply.text)
    headers = [(name, value) for name, value in reply.headers.items() if name != "date"]
    return headers, text.split("\n\n")


@pytest.mark.parametrize("interval", [1, 4])
def test_a_stream_is_the_same_on_either_way(
    engine: Engine, interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, sent = ServerOptions(stream_interval=interval), list[int]()
    app = create_app(engine, options)
    couriers = app.state.service.metrics.couriers
    with running(app, options) as url:
        short = [raw(url, path, body) for path, body in ASKED]
        sent.append(couriers._courier.drain()[0])
        monkeypatch.setattr(short_way.Couriers, "_made", lambda _self: None)
        couriers._loop = None
        assert short == [raw(url, path, body) for path, body in ASKED]
    assert sent[0] > 40  # they went by courier indeed


def test_many_streams_at_once_are_what_they_are_alone(engine: Engine) -> None:
    bodies = [
        COMPLETION | {"prompt": f"# {at}\nimport ", "ignore_eos": True, "max_tokens": 5 + 7 * at}
        for at in range(12)
    ]
    with running(create_app(engine)) as url:
        alone = [raw(url, "/v1/completions", body) for body in bodies]
        together: dict[int, object] = {}

        def ask(at: int) -> None:
            together[at] = raw(url, "/v1/completions", bodies[at])

        threads = [threading.Thread(target=ask, args=(at,)) for at in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        text = httpx.get(f"{url}/metrics").text
    assert [together[at] for at in range(12)] == alone
    told = 2 * sum(5 + 7 * at for at in range(12))
    counted = re.findall(
        r"(?m)^(?:vllm:generation_tokens_total|\S*publish_seconds_count).* (\S+)$", text
    )
    assert [float(number) for number in counted] == [told, told]


@contextmanager
def slow_answer(url: str) -> Iterator[None]:
    """While a streamed answer runs, whose first bytes have come; closed in the middle of it."""
    host, port = urlsplit(url).netloc.split(":")
    body = json.dumps({"prompt": "!slow", "stream": True, "max_tokens": 30})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
    with closing(socket.create_connection((host, int(port)))) as client:
        client.sendall((head + body).encode())
        client.settimeout(10)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 OK\r\n")
        yield


def test_first_tokens_are_counted_while_their_answers_run(served: str, engine: object) -> None:
    """A scrape in the middle of an answer knows its first token."""
    with slow_answer(served):
        text = httpx.get(f"{served}/metrics").text
    count = re.search(r"(?m)^vllm:time_to_first_token_seconds_count.* (\S+)$", text)
    assert count is not None and float(count[1]) == 1


def test_a_failure_behind_the_first_token_is_told_in_the_stream() -> None:
    with running(create_app(FakeEngine())) as url:
        body = {"prompt": "!fail", "stream": True, "max_tokens": 9}
        reply = httpx.post(f"{url}/v1/completions", json=body)
        again = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 4})
    events = [each.removeprefix("data: ") for each in reply.text.strip().split("\n\n")]
    texts = [json.loads(event)["choices"][0]["text"] for event in events[:-2]]
    assert "".join(texts) == ANSWER[:2] and events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == 500
    assert again.json()["choices"][0]["text"] == ANSWER[:4]


class Remembering(FakeEngine):
    """Keeps the errand it was given."""

    errand: Any = None

    async def listen(self, *args: Any, **terms: Any) -> Callable[[], None]:
        self.errand = terms["errand"]
        return await super().listen(*args, **terms)


def test_an_errand_ends_before_its_socket_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number may be another connection's as soon as uvicorn has heard of the loss."""
    engine, taken = Remembering(), list[bool]()
    original = HttpToolsProtocol.connection_lost

    def lost(self: HttpToolsProtocol, error: Exception | None) -> None:
        if engine.errand is not None:
            taken.append(engine.errand.add("too late", 0.0))
        original(self, error)

    monkeypatch.setattr(HttpToolsProtocol, "connection_lost", lost)
    with running(create_app(engine)) as url:
        with slow_answer(url):
            assert engine.errand.add("in time", 0.0)
        deadline = time.monotonic() + 10
        while not taken and time.monotonic() < deadline:
            time.sleep(0.01)
    assert taken == [False]
