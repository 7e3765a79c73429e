"""A gateway over prefill and decode servers: handles are passed on, no failure is a client's."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from ridgeline.config.server import RouteOptions
from ridgeline.errors import BadInput
from ridgeline.workflows.serving.route import route
from tests.fleet.scripted import ScriptedBackend, answering, gateway_over
from tests.fleet.test_gateway import WHOLE, refusing, ridgeline

HANDLE = {"do_remote_prefill": True, "remote_request_id": "abc", "remote_host": "h", "more": [1]}
LONG = "word " * 200


def prefill_server() -> ScriptedBackend:
    return answering(msgspec.json.encode({"kv_transfer_params": HANDLE}))


async def post(http: httpx.AsyncClient, prompt: str = LONG) -> httpx.Response:
    body = {"model": "m", "prompt": prompt, "stream": True}
    return await http.post("/v1/completions", json=body)


async def results(http: httpx.AsyncClient) -> dict[str, float]:
    """What came of asking prefill servers."""
    lines = (await http.get("/metrics")).text.splitlines()
    start = 'ridgeline_fleet_prefills_total{result="'
    own = [line.removeprefix(start).split('"} ') for line in lines if line.startswith(start)]
    return {name: float(value) for name, value in own if float(value)}


async def test_decode_server_gets_the_handle_of_the_prefill_server() -> None:
    prefill, decode = prefill_server(), ridgeline()
    async with gateway_over(prefill=[prefill], decode=[decode]) as http:
        answer = await post(http)
        assert answer.status_code == 200
        assert await results(http) == {"handed_over": 1}
    assert prefill.bodies[0]["kv_transfer_params"]["do_remote_decode"] is True
    assert prefill.bodies[0]["stream"] is False
    assert decode.bodies[0]["kv_transfer_params"] == HANDLE
    assert decode.bodies[0]["prompt"] == LONG


async def test_short_prompt_goes_to_the_decode_server_alone() -> None:
    prefill, decode = prefill_server(), ridgeline()
    async with gateway_over(prefill=[prefill], decode=[decode]) as http:
        assert (await post(http, "hi")).status_code == 200
        assert await results(http) == {"short": 1}
    assert not prefill.bodies
    assert "kv_transfer_params" not in decode.bodies[0]


@pytest.mark.parametrize(
    ("prefill", "result"),
    [
        (refusing(503), "refused"),
        (refusing(400), "refused"),
        (answering(b"{}"), "no_handle"),
        (answering(b"not json"), "no_handle"),
    ],
)
async def test_request_goes_on_without_a_handle(prefill: ScriptedBackend, result: str) -> None:
    decode = ridgeline()
    async with gateway_over(prefill=[prefill], decode=[decode]) as http:
        assert (await post(http)).status_code == 200
        assert await results(http) == {result: 1}
    assert "kv_transfer_params" not in decode.bodies[0]


async def test_prefill_server_that_breaks_off_is_replaced_by_another() -> None:
    async def break_off(
        backend: ScriptedBackend, _: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        writer.transport.abort()

    broken, good, decode = ScriptedBackend(break_off), prefill_server(), ridgeline()
    async with gateway_over(prefill=[broken, good], decode=[decode]) as http:
        for _ in range(3):
            assert (await post(http)).status_code == 200
        assert await results(http) == {"handed_over": 3}
    assert len(broken.bodies) <= 2
    assert all(body["kv_transfer_params"] == HANDLE for body in decode.bodies)


async def test_silent_prefill_server_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.fleet.prefill.pool.TIMEOUT_S", 0.05)

    async def be_silent(*_: Any) -> None:
        await asyncio.sleep(1)

    decode = ridgeline()
    async with gateway_over(prefill=[ScriptedBackend(be_silent)], decode=[decode]) as http:
        assert (await post(http)).status_code == 200
        assert await results(http) == {"late": 1}


async def test_stream_of_a_lost_decode_server_is_resumed_with_a_new_handle() -> None:
    prefill, first, second = prefill_server(), ridgeline(dies_after=2), ridgeline()
    async with gateway_over(prefill=[prefill], decode=[first, second]) as http:
        assert (await post(http)).content == WHOLE
    assert len(prefill.bodies) == 2
    resumed = next(body for body in second.bodies if "ridgeline_resume" in body)
    assert resumed["kv_transfer_params"] == HANDLE


async def test_prefill_server_answers_when_no_decode_server_is_ready() -> None:
    whole, decode = ridgeline(), ridgeline()
    decode.is_ready = False
    async with gateway_over(prefill=[whole], decode=[decode]) as http:
        assert (await post(http)).status_code == 200
        assert await results(http) == {"whole": 1}
    assert not decode.bodies
    assert "kv_transfer_params" not in whole.bodies[-1]


def test_pools_need_each_other() -> None:
    with pytest.raises(BadInput, match="need each other"):
        route(RouteOptions(backend=("http://a:1",), prefill_backend=("http://b:1",)))
