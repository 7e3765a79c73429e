"""The gateway over a prefill and a decode server that hold it to the protocol of vLLM's connector.

What they enforce is in the source of vLLM 0.32: `request_finished` of nixl/pull_scheduler.py, and
the validation of the OpenAI bodies. A real pair needs GPUs and has not been tried.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import httpx
import msgspec
import pytest

from ridgeline.fleet.prefill import pool
from ridgeline.fleet.prefill.vllm_protocol import can_hand_over
from tests.fleet.scripted import HEAD, ScriptedBackend, chunk, gateway_over
from tests.fleet.test_gateway import ridgeline
from tests.fleet.test_prefill_pool import LONG, results

MESSAGES = [{"role": "user", "content": LONG}]


class VllmPair:
    """Two servers with the NixlConnector: blocks that one keeps, another fetches once."""

    def __init__(self, prefill_s: float = 0.0) -> None:
        self.prefill_s = prefill_s
        self.prefill, self.decode = ScriptedBackend(self._prefill), ScriptedBackend(self._decode)
        self.prefill.is_ridgeline = self.decode.is_ridgeline = False
        self.leases: dict[str, tuple[str, list[int]]] = {}  # request → its prompt and blocks
        self.fetched: list[str] = []
        self.num_computed = 0  # prompts that the decode server computed
        self._numbers = itertools.count(1)

    async def _prefill(
        self, _: ScriptedBackend, body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        problem = _refusal(body)
        params = body.get("kv_transfer_params") or {}
        if problem is None and params.get("do_remote_decode"):
            problem = _refusal_of_prefill(body)
        if problem is not None:
            _write(writer, b"400 Bad Request", {"error": {"message": problem}})
            return
        await asyncio.sleep(self.prefill_s)
        number = next(self._numbers)
        request_id, blocks = f"cmpl-{number}", [10 * number, 10 * number + 1]
        self.leases[request_id] = (_prompt(body), blocks)
        kept = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [blocks],
            "remote_engine_id": "engine-p",
            "remote_request_id": request_id,
            "remote_host": "10.0.0.7",
            "remote_port": 5600,
            "tp_size": 1,
        }
        _write(writer, b"200 OK", {"choices": [{"text": "x"}], "kv_transfer_params": kept})

    async def _decode(
        self, _: ScriptedBackend, body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        params = body.get("kv_transfer_params") or {}
        problem = _refusal(body)
        if problem is None and params.get("do_remote_prefill"):
            prompt, blocks = self.leases.pop(params["remote_request_id"], ("", []))
            if [blocks] != params["remote_block_ids"] or prompt != _prompt(body):
                problem = "the blocks are not there: kv_load_failure_policy is 'fail'"
            self.fetched.append(params["remote_request_id"])
        elif problem is None:
            self.num_computed += 1
        if problem is not None:
            _write(writer, b"500 Internal Server Error", {"error": {"message": problem}})
        elif body.get("stream"):
            writer.write(HEAD + b"\r\n" + chunk(b'data: {"text":"a"}\n\n'))
            writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            _write(writer, b"200 OK", {"choices": [{"text": "answer"}]})


def _prompt(body: dict[str, Any]) -> str:
    return msgspec.json.encode(body.get("prompt", body.get("messages"))).decode()


def _refusal(body: dict[str, Any]) -> str | None:
    """What vLLM says of a body that it does not take."""
    if body.get("stream_options") and not body.get("stream"):
        return "Stream options can only be defined when `stream=True`."
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or 16
    if body.get("min_tokens", 0) > limit:
        return f"min_tokens must be less than or equal to max_tokens={limit}"
    return None


def _refusal_of_prefill(body: dict[str, Any]) -> str | None:
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if limit != 1 or body.get("max_tokens") != 1:
        return "a prefill request computes one token, or it decodes the answer here too"
    return "a prefill request is not streamed" if body.get("stream") else None


def _write(writer: asyncio.StreamWriter, status: bytes, body: dict[str, Any]) -> None:
    text = msgspec.json.encode(body)
    writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: %d\r\n\r\n" % len(text) + text)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": LONG}),
        ("completions", {"prompt": LONG, "stream": True, "max_tokens": 64, "n": 1}),
        ("completions", {"prompt": list(range(300)), "max_tokens": 8, "min_tokens": 8}),
        ("chat/completions", {"messages": MESSAGES, "max_completion_tokens": 64}),
        (
            "chat/completions",
            {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}},
        ),
    ],
)
async def test_decode_server_fetches_what_the_prefill_server_has_computed(
    path: str, body: dict[str, Any]
) -> None:
    pair = VllmPair()
    async with gateway_over(prefill=[pair.prefill], decode=[pair.decode]) as http:
        answer = await http.post(f"/v1/{path}", json={"model": "m", **body})
        assert answer.status_code == 200, answer.text
        assert await results(http) == {"handed_over": 1}
    assert pair.fetched == ["cmpl-1"] and not pair.leases and not pair.num_computed
    asked, decoded = pair.prefill.bodies[0], pair.decode.bodies[0]
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    transfer = decoded.pop("kv_transfer_params")
    assert transfer["remote_host"] == "10.0.0.7"
    assert decoded == {"model": "m", **body}, "the decode server gets the client's own limits"


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": LONG, "n": 2},
        {"prompt": [LONG, LONG]},
        {"prompt": [[1, 2] * 99, [3]]},
        {"prompt": LONG, "prompt_logprobs": 0},
        {"prompt": LONG, "echo": True},
    ],
)
async def test_request_that_would_fetch_twice_is_computed_by_the_decode_server(
    body: dict[str, Any],
) -> None:
    pair = VllmPair()
    async with gateway_over(prefill=[pair.prefill], decode=[pair.decode]) as http:
        answer = await http.post("/v1/completions", json={"model": "m", **body})
        assert answer.status_code == 200
        assert await results(http) == {"no_handle": 1}
    assert not pair.prefill.bodies and pair.num_computed == 1


def test_null_and_false_are_no_reason_to_compute_a_prompt_whole() -> None:
    assert can_hand_over({"prompt": "a", "n": None, "prompt_logprobs": None, "echo": False})


async def test_prompt_may_take_longer_than_a_handle_of_ridgeline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "TIMEOUT_S", 0.02)
    pair = VllmPair(prefill_s=0.1)
    body = {"model": "m", "prompt": LONG}
    async with gateway_over(prefill=[pair.prefill], decode=[pair.decode]) as http:
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert await results(http) == {"handed_over": 1}
        monkeypatch.setattr(pool, "COMPUTE_TIMEOUT_S", 0.02)
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert await results(http) == {"handed_over": 1, "late": 1}
    assert pair.num_computed == 1


async def test_prompts_go_to_the_prefill_server_that_computes_fewer_of_them() -> None:
    pair, other = VllmPair(prefill_s=0.1), VllmPair(prefill_s=0.1)
    other.leases = pair.leases
    other._numbers = pair._numbers  # one decode server fetches from both
    servers = [pair.prefill, other.prefill]
    body = {"model": "m", "prompt": LONG}
    async with gateway_over(prefill=servers, decode=[pair.decode], policy="least-loaded") as http:
        posts = [http.post("/v1/completions", json=body) for _ in range(4)]
        answers: list[httpx.Response] = await asyncio.gather(*posts)
    assert [answer.status_code for answer in answers] == [200] * 4
    assert len(pair.prefill.bodies) == len(other.prefill.bodies) == 2


async def test_handle_of_vllm_is_not_given_to_ridgeline() -> None:
    pair, decode = VllmPair(), ridgeline()
    body = {"model": "m", "prompt": LONG, "stream": True}
    async with gateway_over(prefill=[pair.prefill], decode=[decode]) as http:
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert await results(http) == {"no_server": 1}
    assert not pair.prefill.bodies and "kv_transfer_params" not in decode.bodies[0]


async def test_lease_that_ended_is_replaced_by_a_new_one() -> None:
    """vLLM's decode server fails such a request by default."""
    pair = VllmPair()
    decode = pair.decode.handler

    async def lose_the_first(
        backend: ScriptedBackend, body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        if len(backend.bodies) == 1:
            pair.leases.clear()
        await decode(backend, body, writer)

    pair.decode.handler = lose_the_first
    async with gateway_over(prefill=[pair.prefill], decode=[pair.decode]) as http:
        answer = await http.post("/v1/completions", json={"model": "m", "prompt": LONG})
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "answer"
    assert pair.fetched == ["cmpl-1", "cmpl-2"]
