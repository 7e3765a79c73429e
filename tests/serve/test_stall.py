"""No request within the size limit holds the event loop: every route with a JSON body.

The routes are those of the app, so that a new one is attacked too; for those without such a body
see `test_stall_without_body.py`. The bound is on the CPU time
of single callbacks on the loop's thread: other processes on the machine hardly change it.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import cache
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts
from pydantic import BaseModel

from ridgeline.config.server import ServerOptions
from ridgeline.serve.app import create_admin_app, create_app, include_protected
from ridgeline.serve.batch import routes as batch_routes
from ridgeline.serve.bodies.routing import JsonRoute
from tests.serve.fake_engine import FakeEngine
from tests.serve.loop_time import CallbackTimes, callback_times

MAX_BYTES = ServerOptions().max_body_bytes
MAX_HELD_S = 0.05
TRIES = 3
"""A body that holds the loop for longer is sent again: on a busy machine, caches are cold."""


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
    routes = [*whole_app().routes, *create_admin_app(whole_app().state.service).routes]
    contexts = [context.original_route for context in iter_route_contexts(routes)]
    return [route for route in contexts if isinstance(route, APIRoute) and route.body_field]


def whole_app() -> FastAPI:
    """The app with all routes that options add."""
    app = create_app(FakeEngine(), ServerOptions(allow_runtime_lora_updating=True))
    store: Any = None  # a batch of no endpoint is refused before the store is asked
    app.state.batches = batch_routes.BatchService(store, worker=store, endpoints=())
    include_protected(app, batch_routes.router)
    return app


def _model(route: APIRoute) -> type[BaseModel] | None:
    model = route.body_field.field_info.annotation if route.body_field else None
    return model if isinstance(model, type) and issubclass(model, BaseModel) else None


def _declared_in(model: type[BaseModel], field: str) -> type:
    """The class of the model's ancestors, or the model, that declares a field."""
    return next(kind for kind in model.__mro__ if field in getattr(kind, "__annotations__", {}))


def _attacked_fields(routes: Sequence[APIRoute]) -> dict[str, list[str]]:
    """Path → the fields to attack there. A field that several routes inherit is validated by the
    same code for all of them, and attacked on the first."""
    seen: set[tuple[type, str]] = set()
    attacked: dict[str, list[str]] = {}
    for route in routes:
        model = _model(route)
        names = [] if model is None else list(model.model_fields)
        own = [(_declared_in(model, name), name) for name in names if model is not None]
        attacked[route.path] = [name for kind, name in own if (kind, name) not in seen]
        seen |= set(own)
    return attacked


PLACEHOLDERS: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": "a"}],
    "max_tokens": 1,
}


def _bodies(route: APIRoute) -> Iterator[tuple[str, bytes]]:
    """The largest bodies: each shape alone, in an unknown field, and a bad one in each field.

    A body that is no object is refused by `JsonRoute` before the route is known: it is sent to one
    of those routes.
    """
    model = _model(route)
    required: dict[str, str] = {}
    aliases: dict[str, str] = {}
    for name, field in {} if model is None else model.model_fields.items():
        aliases[name] = field.alias or name
        if field.is_required():
            required[aliases[name]] = json.dumps(PLACEHOLDERS.get(name, "a"))
    is_json_route = isinstance(route, JsonRoute) and model is not None
    for what in ("keys", "some keys") if is_json_route and route is not ROUTES[0] else SHAPES:
        yield f"{what} as the body", _shape(what, MAX_BYTES)
    fields = [aliases[name] for name in ATTACKED[route.path]]
    worst = itertools.cycle(("texts and numbers", "some keys", "token ids", "messages"))
    for field, what in [("unknown", what) for what in SHAPES] + [*zip(fields, worst, strict=False)]:
        given = [f'"{name}":{value},' for name, value in required.items() if name != field]
        value = _shape(what, MAX_BYTES - 4096)
        yield f"{what} as {field}", f'{{{"".join(given)}"{field}":'.encode() + value + b"}"


@cache
def _shape(what: str, size: int) -> bytes:
    return SHAPES[what](size).encode()


ROUTES = sorted(_routes(), key=lambda route: route.path != "/v1/completions")
ATTACKED = _attacked_fields(ROUTES)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    app = whole_app()
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


async def _held_s(http: httpx.AsyncClient, path: str, body: bytes, times: CallbackTimes) -> float:
    """For how long a body holds the loop."""
    await asyncio.sleep(0)  # the callback that made the body ends here
    times.reset()
    reply = await http.post(path, content=body)
    await asyncio.sleep(0)  # the last callback of the request ends here
    assert reply.status_code < 500, reply.text[:200]
    return times.longest_s


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
async def test_no_body_holds_the_event_loop(
    route: APIRoute, http: httpx.AsyncClient, times: CallbackTimes
) -> None:
    held: list[tuple[float, str]] = []
    for what, body in _bodies(route):
        held_s = await _held_s(http, route.path, body, times)
        for _ in range(TRIES - 1):
            if held_s < MAX_HELD_S:
                break
            held_s = min(held_s, await _held_s(http, route.path, body, times))
        held.append((held_s, what))
    held.sort(reverse=True)
    assert held[0][0] < MAX_HELD_S, held[:5]


def test_every_field_of_every_route_is_attacked_once() -> None:
    for route in ROUTES:
        model = _model(route)
        for name in () if model is None else model.model_fields:
            kind = _declared_in(model, name)  # type: ignore[arg-type]
            assert any(
                name in ATTACKED[other.path] and issubclass(_model(other), kind)  # type: ignore
                for other in ROUTES
                if _model(other) is not None
            ), (route.path, name)
