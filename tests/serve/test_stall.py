"""No request within the size limit holds the event loop: every route, with the largest bodies.

The routes are those of the app, so that a new one is attacked too. The bound is on the CPU time
of single callbacks on the loop's thread: other processes on the machine hardly change it.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute, iter_route_contexts
from pydantic import BaseModel

from ridgeline.config.server import ServerOptions
from ridgeline.serve.app import create_app
from tests.serve.fake_engine import FakeEngine
from tests.serve.loop_time import CallbackTimes, callback_times

MAX_BYTES = ServerOptions().max_body_bytes
MAX_HELD_S = 0.05
TOLERANCE = 3.0
"""A slow machine takes this much longer than the one that the bound was measured on."""


def _repeat(part: str, num_bytes: int) -> str:
    return ",".join([part] * max(1, (num_bytes - 2) // (len(part) + 1)))


def _object(num_keys: int) -> str:
    return "{" + ",".join(f'"{index:07}":1' for index in range(num_keys)) + "}"


SHAPES = {
    "a text": lambda size: '"' + "a b" * (size // 3 - 2) + '"',
    "blanks": lambda size: '"' + " " * (size - 4) + '"',
    "quotes": lambda size: '"' + '\\"' * (size // 2 - 4) + '"',
    "numbers": lambda size: f"[{_repeat('1', size)}]",
    "token ids": lambda size: f"[{_repeat('1234567', size)}]",
    "texts": lambda size: f"[{_repeat(chr(34) + 'a' + chr(34), size)}]",
    "texts and numbers": lambda size: "[" + _repeat('"a",1', size) + "]",
    "lists": lambda size: f"[{_repeat('[]', size)}]",
    "lists of one": lambda size: f"[{_repeat('[1]', size)}]",
    "some lists of one": lambda size: f"[{_repeat('[1]', min(size, 40_000))}]",
    "objects": lambda size: f"[{_repeat('{}', size)}]",
    "some objects": lambda size: f"[{_repeat('{}', min(size, 40_000))}]",
    "messages": lambda size: (
        "[" + _repeat('{"role":"user","content":"a"}', min(size, 240_000)) + "]"
    ),
    "keys": lambda size: _object(size // 12),
    "some keys": lambda size: _object(min(size // 12, 30_000)),
    "nesting": lambda size: "[" * (size // 2 - 1) + "]" * (size // 2 - 1),
    "a long number": lambda size: "1" * size,
}  # fmt: skip


def _routes() -> list[APIRoute]:
    contexts = iter_route_contexts(create_app(FakeEngine()).routes)
    routes = [context.original_route for context in contexts]
    return [route for route in routes if isinstance(route, APIRoute) and "POST" in route.methods]


def _fields(route: APIRoute) -> dict[str, bool]:
    """The fields of the route's body, and whether they are required."""
    model = route.body_field.field_info.annotation if route.body_field else None
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return {}
    return {field.alias or name: field.is_required() for name, field in model.model_fields.items()}


PLACEHOLDERS: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": "a"}],
    "max_tokens": 1,
}


def _bodies(route: APIRoute) -> Iterator[tuple[str, bytes]]:
    """The largest bodies: each shape alone, in an unknown field, and a bad one in each field."""
    fields = _fields(route)
    required = {
        name: json.dumps(PLACEHOLDERS.get(name, "a")) for name, needed in fields.items() if needed
    }
    worst = itertools.cycle(("texts and numbers", "some keys", "token ids", "messages"))
    for what, shape in SHAPES.items():
        yield f"{what} as the body", shape(MAX_BYTES).encode()
    shapes = [("unknown", what) for what in SHAPES] + list(zip(fields, worst, strict=False))
    for field, what in shapes:
        given = {name: value for name, value in required.items() if name != field}
        size = MAX_BYTES - sum(len(name) + len(value) + 8 for name, value in given.items())
        given[field] = SHAPES[what](size - len(field) - 64)
        body = ",".join(f'"{name}":{value}' for name, value in given.items())
        yield f"{what} as {field}", f"{{{body}}}".encode()


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(FakeEngine())
    gc.collect()
    gc.freeze()  # as the server does: a collection does not walk what earlier tests have loaded
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield client
    gc.unfreeze()


@pytest.fixture
def times() -> Iterator[CallbackTimes]:
    with callback_times() as times:
        yield times


@pytest.mark.slow
@pytest.mark.parametrize("route", _routes(), ids=lambda route: route.path)
async def test_no_body_holds_the_event_loop(
    route: APIRoute, http: httpx.AsyncClient, times: CallbackTimes
) -> None:
    held: list[tuple[float, str, int]] = []
    for what, body in _bodies(route):
        await asyncio.sleep(0)  # the callback that made the body ends here
        times.reset()
        reply = await http.post(route.path, content=body)
        assert reply.status_code < 500, (what, reply.text[:200])
        held.append((times.longest_s, what, reply.status_code))
    held.sort(reverse=True)
    assert held[0][0] < MAX_HELD_S * TOLERANCE, held[:5]
