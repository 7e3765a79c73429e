"""A stream that breaks off after any token continues on another server to the byte."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from ridgeline.config.server import ServerOptions
from ridgeline.engine.engine import Engine
from ridgeline.errors import EngineFull
from ridgeline.records import Event, Failed, FailureCause, Started, Token
from ridgeline.serve.app import create_app
from ridgeline.serve.drain import ServerStopping
from ridgeline.serve.generation.resume import IDENTITY_HEADER, RESUMABLE_HEADER, RESUME_FIELD
from ridgeline.serve.telemetry.base import RequestRecord
from tests.serve.conftest import running
from tests.serve.fake_engine import FakeEngine
from tests.serve.test_telemetry import Recorder

MESSAGES = [{"role": "user", "content": "import os"}]
TOOL = {
    "name": "lookup",
    "parameters": {"type": "object", "properties": {"q": {"type": "string", "maxLength": 8}}},
}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 6}},
    "required": ["n", "s"],
    "additionalProperties": False,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("completions", {"prompt": "def f(", "max_tokens": 12, "ignore_eos": True}),
    "unseeded": ("completions", {"prompt": "x", "max_tokens": 10, "temperature": 1.5}),
    "prompts": (
        "completions",
        {"prompt": ["import ", "def g("], "n": 2, "max_tokens": 6, "seed": 3, "echo": True},
    ),
    "penalties": (
        "completions",
        {
            "prompt": "for i in",
            "max_tokens": 14,
            "frequency_penalty": 1.1,
            "repetition_penalty": 1.3,
            "seed": 8,
            "logprobs": 2,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "stop": ("completions", {"prompt": "def f(", "max_tokens": 30, "stop": ["\n", "zz"]}),
    "chat": ("chat/completions", {"messages": MESSAGES, "n": 3, "seed": 5, "max_tokens": 8}),
    "chat_logprobs": (
        "chat/completions",
        {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "max_tokens": 8},
    ),
    "schema": (
        "chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 40,
            "seed": 1,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            },
        },
    ),
    "tools": (
        "chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 40,
            "seed": 2,
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": "required",
        },
    ),
    "responses": ("responses", {"input": "import os", "max_output_tokens": 16}),
    "messages": (
        "messages",
        {"model": "demo", "messages": MESSAGES, "max_tokens": 10, "temperature": 1.0},
    ),
}
COMMENT = re.compile(rb"(?m)^: (open|end|migrate|\d+:\d*)\n\n")


@pytest.fixture(scope="module")
def app() -> Iterator[FastAPI]:
    with Engine.open("demo", kv_cache_memory_bytes=32 << 20, num_threads=1) as engine:
        yield create_app(
            engine, ServerOptions(enable_auto_tool_choice=True, tool_call_parser="hermes")
        )


@pytest.fixture
def http(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def stream(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> httpx.Response:
    headers = {RESUMABLE_HEADER: "1"}
    return await http.post(f"/v1/{path}", json={**body, "stream": True}, headers=headers)


def without_comments(data: bytes) -> bytes:
    return COMMENT.sub(b"", data)


def resume_point(reply: httpx.Response, data: bytes) -> dict[str, Any]:
    """What a gateway sends that has received `data` of a response."""
    tokens: list[list[int]] = []
    opened = False
    for mark in COMMENT.findall(data):
        opened = opened or mark == b"open"
        choice, colon, token = mark.partition(b":")
        if colon and token:
            tokens += [[] for _ in range(int(choice) + 1 - len(tokens))]
            tokens[int(choice)].append(int(token))
    return {**json.loads(reply.headers[IDENTITY_HEADER]), "opened": opened, "tokens": tokens}


def comparable(data: bytes) -> bytes:
    """Without the number of cached tokens, which differs from server to server; by choice, since
    the order of events of different choices depends on the batch."""
    data = re.sub(rb'"cached_tokens":\d+', b'"cached_tokens":0', data)
    data = re.sub(rb'"(cache_read_)?input_tokens":\d+', b'"input_tokens":0', data)
    events: list[bytes] = data.split(b"\n\n")
    events.sort(key=_choice_of)
    return b"\n\n".join(events)


def _choice_of(event: bytes) -> int:
    found = re.search(rb'"choices":\[\{"index":(\d+)', event)
    return int(found[1]) if found else 99


@pytest.mark.parametrize("name", CASES)
async def test_stream_continues_to_the_byte_after_a_comment(
    http: httpx.AsyncClient, name: str
) -> None:
    path, body = CASES[name]
    whole = await stream(http, path, body)
    assert whole.status_code == 200, whole.text
    assert whole.content.endswith(b": end\n\n")
    cuts = [match.end() for match in COMMENT.finditer(whole.content)][:-1]
    assert len(cuts) > 1
    for cut in cuts[:4] + cuts[4:-3:5] + cuts[-3:]:
        sent = whole.content[:cut]
        point = resume_point(whole, sent)
        rest = await stream(http, path, {**body, RESUME_FIELD: point})
        assert rest.status_code == 200, rest.text
        joined = without_comments(sent) + without_comments(rest.content)
        assert comparable(joined) == comparable(without_comments(whole.content)), cut


async def test_bytes_are_those_of_a_stream_without_comments(http: httpx.AsyncClient) -> None:
    for path, body in CASES.values():
        if "seed" not in body:
            continue
        marked = await stream(http, path, body)
        plain = await http.post(f"/v1/{path}", json={**body, "stream": True})
        identity = json.loads(marked.headers[IDENTITY_HEADER])
        assert IDENTITY_HEADER not in plain.headers and b"\n: " not in plain.content
        plain_id = re.search(rb'"id":"([^"]+)"', plain.content)
        assert plain_id is not None
        renamed = re.sub(rb"(call_)[0-9a-f]+", rb"\1", plain.content)
        renamed = renamed.replace(plain_id[1], identity["id"].encode())
        renamed = re.sub(rb'"created":\d+', b'"created":%d' % identity["created"], renamed)
        expected = re.sub(rb"(call_)[0-9a-f]+", rb"\1", without_comments(marked.content))
        assert comparable(renamed) == comparable(expected)


async def test_field_means_nothing_without_the_header(http: httpx.AsyncClient) -> None:
    body = {"prompt": "x", "max_tokens": 2, RESUME_FIELD: {"id": "a", "created": 1, "seed": 1}}
    reply = await http.post("/v1/completions", json=body)
    assert reply.status_code == 200
    assert RESUME_FIELD in reply.headers["x-ridgeline-ignored-fields"]
    assert reply.json()["id"] != "a"


@pytest.mark.parametrize(
    "point",
    [
        {},
        {"id": "a", "created": 1},
        {"id": "a\n", "created": 1, "seed": 1},
        {"id": "a", "created": 1, "seed": 1, "tokens": [["x"]]},
        {"id": "a", "created": 1, "seed": 1, "tokens": [[1], [2]]},
        {"id": "a", "created": 1, "seed": 1, "tokens": [[10**7]]},
        {"id": "a", "created": 1, "seed": 1, "tokens": [[1] * 9]},
        7,
    ],
)
async def test_malformed_resume_points_are_refused(http: httpx.AsyncClient, point: Any) -> None:
    reply = await stream(http, "completions", {"prompt": "x", "max_tokens": 8, RESUME_FIELD: point})
    assert reply.status_code == 400, reply.text


async def test_stopping_server_asks_to_continue_elsewhere() -> None:
    engine, recorder = FakeEngine(), Recorder()
    app = create_app(engine)
    app.state.service.telemetry = recorder
    body = {"prompt": "!slow", "max_tokens": 200, "stream": True}
    with running(app) as url:
        async with httpx.AsyncClient(base_url=url) as http:
            for headers, ends in (({RESUMABLE_HEADER: "1"}, b": migrate\n\n"), ({}, b"[DONE]\n\n")):
                received = b""
                async with http.stream(
                    "POST", "/v1/completions", json=body, headers=headers
                ) as reply:
                    async for chunk in reply.aiter_bytes():
                        if not received:
                            app.state.service.end_streams()
                        received += chunk
                assert received.endswith(ends)
                assert (b"error" in received) == (not headers)
    assert [(r.is_migrated, r.error) for r in recorder.records] == [(True, ""), (False, "503")]


class EngineOfEvents(FakeEngine):
    """Answers every request with the same events, all but the first in one step."""

    def __init__(self, *events: Event) -> None:
        super().__init__()
        self.events = events

    async def listen(
        self,
        prompt: str | Sequence[int],
        sampling: Any,
        sink: Callable[[Sequence[Event]], None],
        **terms: Any,
    ) -> Callable[[], None]:
        loop = asyncio.get_running_loop()
        loop.call_soon(sink, self.events[:1])
        loop.call_later(0.02, sink, self.events[1:])
        return lambda: None


def started() -> Event:
    return Started(request_id="r", at_s=0.0, cached_tokens=0)


def token(number: int, choice: int = 0) -> Event:
    return Token(request_id="r", index=choice, token=number, text=chr(number), at_s=0.0)


def failed(cause: FailureCause) -> Event:
    return Failed(request_id="r", at_s=0.0, error="the engine stopped", cause=cause)


async def recorded(engine: FakeEngine, **body: Any) -> tuple[httpx.Response, RequestRecord]:
    """The response to a resumable stream, and its record."""
    app, recorder = create_app(engine), Recorder()
    app.state.service.telemetry = recorder
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        reply = await stream(http, "completions", {"prompt": "x", **body})
    (record,) = recorder.records
    return reply, record


@pytest.mark.parametrize(("cause", "error"), [("engine", "503"), ("error", "500")])
async def test_stream_of_a_failed_engine_continues_elsewhere_and_is_an_error_here(
    cause: FailureCause, error: str
) -> None:
    engine = EngineOfEvents(started(), token(72), failed(cause))
    reply, record = await recorded(engine)
    assert reply.content.endswith(b": migrate\n\n")
    assert (record.is_migrated, record.error, record.output_tokens) == (False, error, 1)


async def test_request_that_a_stopping_server_refuses_is_not_migrated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(*_: Any, **__: Any) -> Any:
        raise ServerStopping(503, "the server is stopping")

    engine = FakeEngine()
    monkeypatch.setattr(engine, "listen", refuse)
    reply, record = await recorded(engine)
    assert reply.status_code == 503 and b"migrate" not in reply.content
    assert (record.is_migrated, record.error) == (False, "503")


async def test_only_replayed_tokens_are_those_of_another_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = {"id": "cmpl-1", "created": 1, "seed": 1, "opened": True, "tokens": [[72], [72, 73]]}
    events = (started(), *map(token, b"Hey"), failed("engine"))
    _, record = await recorded(EngineOfEvents(*events), n=2, **{RESUME_FIELD: point})
    assert (record.output_tokens, record.resumed_tokens, record.generated_tokens) == (3, 1, 2)

    async def refuse(*_: Any, **__: Any) -> Any:
        raise EngineFull("full", reason="queue", retry_after_s=1.0)

    engine = FakeEngine()
    monkeypatch.setattr(engine, "listen", refuse)
    _, record = await recorded(engine, n=2, **{RESUME_FIELD: point})
    assert record.is_resumed and record.error == "EngineFull"
    assert (record.output_tokens, record.generated_tokens) == (0, 0)
