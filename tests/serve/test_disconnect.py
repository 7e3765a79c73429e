"""A client that hangs up frees the engine at once: streams, plain answers, and lists of prompts."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from tests.serve.fake_engine import FakeEngine


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


def send(url: str, body: dict[str, object]) -> http.client.HTTPConnection:
    """A request whose answer nobody has read yet."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request("POST", "/v1/completions", json.dumps(body))
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("order", ["!stuck", "!slow"])
async def test_hanging_up_aborts(served: str, engine: FakeEngine, order: str, stream: bool) -> None:
    body = {"prompt": [order, order], "stream": stream, "max_tokens": 30}
    connection = send(served, body)
    await until(lambda: len(engine.requests) == 2)
    connection.close()
    await until(lambda: len(engine.aborted) == 2)
    assert sorted(engine.aborted) == sorted(engine.requests) and not engine.ended


async def test_random_hang_ups_leave_nothing_behind(served: str, engine: FakeEngine) -> None:
    rng = random.Random(7)
    for _ in range(40):
        connection = send(served, {"prompt": "!slow", "stream": rng.random() < 0.5})
        await asyncio.sleep(rng.random() * 0.02)
        connection.close()
    await asyncio.sleep(0.1)  # the last request may still be on its way
    await until(lambda: set(engine.aborted) | set(engine.ended) == set(engine.requests))
    assert engine.aborted


async def test_reading_to_the_end_aborts_nothing(served: str, engine: FakeEngine) -> None:
    for stream in (False, True):
        with contextlib.closing(send(served, {"prompt": "hi", "stream": stream})) as connection:
            reply = connection.getresponse()
            assert reply.status == 200 and reply.read()
    assert not engine.aborted and len(engine.ended) == 2
