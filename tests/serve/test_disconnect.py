"""A disconnect aborts a request: streams, whole responses, and lists of prompts."""

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
    """Send a request; its response is not read."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request("POST", "/v1/completions", json.dumps(body))
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("command", ["!stuck", "!slow"])
async def test_disconnect_aborts_every_prompt(
    served: str, engine: FakeEngine, command: str, stream: bool
) -> None:
    body = {"prompt": [command, command], "stream": stream, "max_tokens": 30}
    connection = send(served, body)
    await until(lambda: len(engine.requests) == 2)
    connection.close()
    await until(lambda: len(engine.aborted) == 2)
    assert sorted(engine.aborted) == sorted(engine.requests) and not engine.ended


async def test_random_disconnects_leave_no_request_running(served: str, engine: FakeEngine) -> None:
    rng = random.Random(7)
    for _ in range(40):
        connection = send(served, {"prompt": "!slow", "stream": rng.random() < 0.5})
        await asyncio.sleep(rng.random() * 0.02)
        connection.close()
    await asyncio.sleep(0.1)  # the last request may not have arrived yet
    await until(lambda: set(engine.aborted) | set(engine.ended) == set(engine.requests))
    assert engine.aborted


async def test_complete_responses_abort_nothing(served: str, engine: FakeEngine) -> None:
    for stream in (False, True):
        with contextlib.closing(send(served, {"prompt": "hi", "stream": stream})) as connection:
            reply = connection.getresponse()
            assert reply.status == 200 and reply.read()
    assert not engine.aborted and len(engine.ended) == 2
