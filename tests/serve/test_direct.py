"""The short way to a route answers as the router does; the quick look at prompts sees what the slow
one sees."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter, ValidationError

from ridgeline.serve import app as made
from ridgeline.serve.openai.schemas import Count, Prompts
from tests.serve.fake_engine import FakeEngine

CRASH = {"prompt": "!crash"}
HELLO = [{"role": "user", "content": "hi"}]
ASKED: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 3}),
    ("POST", "/v1/completions", {"prompt": [1, 2, 3], "stream": True}),
    ("POST", "/v1/completions", CRASH),
    ("POST", "/v1/completions", {"prompt": "!fail"}),
    ("POST", "/v1/completions", {"prompt": "a", "stream": True, "temperature": -1}),
    ("POST", "/v1/completions", {"prompt": "a", "model": "another"}),
    ("POST", "/v1/completions", {"prompt": []}),
    ("POST", "/v1/completions", b"{"),
    ("POST", "/v1/chat/completions", {"messages": HELLO, "max_tokens": 3}),
    ("POST", "/v1/chat/completions", {"messages": HELLO, "stream": True, "unknown": 1}),
    ("POST", "/v1/chat/completions", {"messages": []}),
    ("POST", "/v1/responses", {"input": "hi"}),
    ("POST", "/v1/messages", {"model": "fake", "messages": HELLO, "max_tokens": 3}),
    ("POST", "/v1/messages", {"model": "fake", "messages": HELLO}),
    ("POST", "/v1/messages/count_tokens", {"model": "fake", "messages": HELLO}),
    ("POST", "/v1/embeddings", {"input": "hi"}),
    ("POST", "/tokenize", {"prompt": "hi"}),
    ("POST", "/detokenize", {"tokens": [1]}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/fake", None),
    ("GET", "/v1/models/another", None),
    ("GET", "/health", None),
    ("HEAD", "/health", None),
    ("GET", "/ready", None),
    ("GET", "/version", None),
    ("GET", "/openapi.json", None),
    ("GET", "/v1/completions", None),
    ("DELETE", "/v1/completions", None),
    ("POST", "/v1/completions/", {"prompt": "a"}),
    ("POST", "/v1//completions", {"prompt": "a"}),
    ("GET", "/nowhere", None),
)
FRESH = re.compile(r'"(?:[a-z]+[-_])[0-9a-f]{8,}"|"created(?:_at)?":[0-9.]+')


async def answers() -> list[tuple[int, dict[str, str], str]]:
    """What each of `ASKED` is answered. What nobody expected is raised as well, and logged by the
    server: nothing else may be."""
    app = made.create_app(FakeEngine())
    found = []
    for method, path, body in ASKED:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=body != CRASH)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            content = body if isinstance(body, bytes) or body is None else json.dumps(body)
            named = {"x-request-id": "mine"}
            reply = await http.request(method, path, content=content, headers=named)
            found.append((reply.status_code, dict(reply.headers), FRESH.sub("", reply.text)))
    return found


async def test_either_way_gives_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    short = await answers()
    monkeypatch.setattr(made, "_fixed", lambda _service, _routes: {})
    long = await answers()
    for asked, one, other in zip(ASKED, short, long, strict=True):
        assert _named(one) == _named(other), asked
    assert {200, 400, 404, 405, 500} <= {status for status, _, _ in short}


def _named(answer: tuple[int, dict[str, str], str]) -> tuple[int, dict[str, str], str]:
    """Without the length of what was taken out."""
    status, headers, text = answer
    return status, {k: v for k, v in headers.items() if k != "content-length"}, text


async def test_fixed_paths_do_not_meet_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    app = made.create_app(FakeEngine())

    async def router(*_scope: Any) -> None:
        raise AssertionError("the router was asked")

    monkeypatch.setattr(app.router, "app", router)
    monkeypatch.setattr(app.router, "middleware_stack", router)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        assert (await http.get("/version")).status_code == 200
        assert (await http.get("/v1/models/fake")).status_code == 500  # a parameter: routed


SLOW: TypeAdapter[Any] = TypeAdapter(str | list[str] | list[Count] | list[list[Count]])
QUICK: TypeAdapter[Any] = TypeAdapter(Prompts)


def outcome(adapter: TypeAdapter[Any], raw: str) -> tuple[str, Any]:
    try:
        found = adapter.validate_json(raw)
    except ValidationError as error:
        return "refused", [(each["loc"], each["msg"]) for each in error.errors()]
    return "taken", (found, [type(each) for each in found])


def test_prompts_are_read_as_the_plain_union_reads_them() -> None:
    rng = random.Random(3)
    odd = [True, 1.0, 1.5, "1", "a", None, -1, 2**31, 2**31 - 1, 10**30, [], [1], [-1], {}, 0]
    raws = ['"text"', "[]", "[[]]", "null", "{}", "[[1],[2,3]]", '["a","b"]']
    for _ in range(3000):
        some = [rng.randrange(2**31) for _ in range(rng.randint(0, 6))]
        for _ in range(rng.randint(0, 2)):
            some.insert(rng.randint(0, len(some)), rng.choice(odd))  # type: ignore[arg-type]
        raws.append(json.dumps(some))
    kinds = {outcome(QUICK, raw)[0] for raw in raws}
    assert kinds == {"taken", "refused"}
    for raw in raws:
        assert outcome(QUICK, raw) == outcome(SLOW, raw), raw
