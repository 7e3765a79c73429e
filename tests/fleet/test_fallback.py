"""A managed API behind the gateway: when it is asked, what it may cost, when it is left alone."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from ridgeline.errors import BadInput
from ridgeline.fleet.fallback import CircuitBreaker, HourlyBudget
from tests.fleet.scripted import HEAD, ScriptedBackend, chunk, gateway_over

BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 100}
PRICES = {
    "model": "theirs",
    "api_key": "secret",
    "input_price": 1.0,
    "output_price": 10.0,
    "dollars_per_hour": 1.0,
    "after_s": 0.0,
}


def api(status: int = 200, *, breaks: bool = False) -> ScriptedBackend:
    async def answer(
        backend: ScriptedBackend, body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        if body.get("stream"):
            writer.write(HEAD + b"\r\n" + chunk(b'data: {"t":1}\n\n'))
            if breaks:
                await writer.drain()
                raise ConnectionError
            writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            return
        text = b'{"usage":{"prompt_tokens":1000,"completion_tokens":50}}'
        length = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(text)
        writer.write(b"HTTP/1.1 %d Is\r\n" % status + length + text)

    return ScriptedBackend(answer)


def own(status: int = 503) -> ScriptedBackend:
    async def answer(
        backend: ScriptedBackend, _: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        writer.write(b"HTTP/1.1 %d No\r\ncontent-length: 2\r\n\r\n{}" % status)

    return ScriptedBackend(answer)


async def post(http: httpx.AsyncClient, headers: Any = None, **fields: Any) -> httpx.Response:
    return await http.post("/v1/chat/completions", json={**BODY, **fields}, headers=headers)


async def metric(http: httpx.AsyncClient, name: str) -> float:
    page = (await http.get("/metrics")).text
    line = next(x for x in page.splitlines() if x.startswith(f"ridgeline_fallback_{name}_total "))
    return float(line.rsplit(" ", 1)[1])


async def test_api_answers_when_every_backend_fails() -> None:
    theirs = api()
    async with gateway_over(own(), fallback=theirs, fallback_options=PRICES) as http:
        reply = await post(http)
        assert reply.status_code == 200 and reply.headers["x-ridgeline-served-by"] == "fallback"
        assert theirs.bodies[0]["model"] == "theirs"
        assert await metric(http, "requests") == 1
        assert await metric(http, "dollars") == pytest.approx((1000 * 1 + 50 * 10) / 1e6)


async def test_api_answers_when_no_backend_is_ready() -> None:
    backend, theirs = own(), api()
    options = {**PRICES, "after_s": 0.05}
    async with gateway_over(backend, fallback=theirs, fallback_options=options) as http:
        backend.is_ready = False
        while (await http.get("/ready")).status_code == 200:
            await asyncio.sleep(0.02)
        reply = await post(http, stream=True)
        assert reply.content.endswith(b"[DONE]\n\n")


async def test_key_and_refused_requests_stay_in_the_house() -> None:
    theirs = api()
    seen: list[bytes] = []
    serve = theirs.serve

    async def watch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        original = reader.readuntil

        async def read(separator: bytes) -> bytes:
            head = await original(separator)
            seen.append(head)
            return head

        reader.readuntil = read  # type: ignore[method-assign, assignment]
        await serve(reader, writer)

    theirs.serve = watch  # type: ignore[method-assign]
    async with gateway_over(own(), fallback=theirs, fallback_options=PRICES) as http:
        refused = await post(http, {"x-ridgeline-fallback": "never"})
        assert refused.status_code == 503 and not theirs.bodies
        await post(http, {"authorization": "Bearer client-key", "cookie": "private"})
    (head,) = seen
    assert b"Bearer secret" in head and b"client-key" not in head and b"private" not in head


async def test_budget_ends_what_the_api_gets() -> None:
    options = {**PRICES, "dollars_per_hour": 0.003}
    async with gateway_over(own(), fallback=api(), fallback_options=options) as http:
        statuses = [(await post(http)).status_code for _ in range(4)]
        assert statuses == [200, 200, 503, 503]  # 0.0015 dollars each, 0.001 reserved before


async def test_broken_stream_of_the_api_ends_in_an_error_event() -> None:
    async with gateway_over(own(), fallback=api(breaks=True), fallback_options=PRICES) as http:
        reply = await post(http, stream=True)
        assert b'"error"' in reply.content and reply.content.endswith(b"[DONE]\n\n")
        assert await metric(http, "failed") == 1


async def test_failing_api_is_left_alone() -> None:
    theirs = api(500)
    async with gateway_over(
        own(), fallback=theirs, fallback_options=PRICES, retry_share=1.0
    ) as http:
        for _ in range(8):
            assert (await post(http)).status_code >= 500
        assert len(theirs.bodies) == 5


def test_breaker_closes_after_successes() -> None:
    breaker = CircuitBreaker(max_failures=2, open_s=10, num_successes=2)
    for _ in range(2):
        breaker.start(0)
        breaker.end(0, succeeded=False)
    assert breaker.is_open(9) and not breaker.is_open(10)
    breaker.start(10)
    assert breaker.is_open(10)  # one at a time
    breaker.end(11, succeeded=True)
    breaker.start(11)
    breaker.end(12, succeeded=True)
    breaker.start(12)
    assert not breaker.is_open(12)


def test_budget_forgets_after_an_hour() -> None:
    budget = HourlyBudget(1.0)
    budget.reserve(0.6)
    assert not budget.has_room(0.5, 0)
    budget.settle(0.6, 0.9, 0)
    assert not budget.has_room(0.2, 3599) and budget.has_room(0.2, 3601)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dollars_per_hour": 0.0}, "needs --fallback-dollars-per-hour"),
        ({"input_price": 0.0, "output_price": 0.0}, "bounds nothing without prices"),
    ],
)
async def test_fallback_without_a_budget_is_refused(
    changes: dict[str, float], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        async with gateway_over(own(), fallback=api(), fallback_options={**PRICES, **changes}):
            pass
