"""What a request may cost: values are counted before parsing, and refused requests are charged."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import httpx
import msgspec
import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.engine.tokenization.tokenizer import load_tokenizer
from ridgeline.errors import BadInput
from ridgeline.serve.app import create_app
from ridgeline.serve.auth.keys import new_key
from ridgeline.serve.bodies.json_bounds import MAX_CONTAINERS, check_json_bounds
from ridgeline.serve.bodies.memory import BodyMemory
from ridgeline.serve.bodies.turns import BodyTurns
from ridgeline.serve.config import LIMITS
from ridgeline.serve.errors import ApiError
from ridgeline.serve.generation.prompt_reader import PromptReader
from tests.serve.fake_engine import CharTokenizer, FakeEngine

COMPLETIONS = "/v1/completions"


def client(**options: object) -> httpx.AsyncClient:
    app = create_app(FakeEngine(), ServerOptions(**options))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize", "/detokenize", "/v1/embeddings"])
async def test_refused_requests_are_charged(path: str) -> None:
    async with client(requests_per_minute=3) as http:
        replies = [await http.post(path, content=b'{"temperature":-1}') for _ in range(5)]
    assert [reply.status_code for reply in replies] == [400, 400, 400, 429, 429]


async def test_reading_is_not_charged() -> None:
    async with client(requests_per_minute=1) as http:
        statuses = [(await http.get("/v1/models")).status_code for _ in range(3)]
    assert statuses == [200, 200, 200]


async def test_long_text_is_charged_before_it_is_tokenised() -> None:
    async with client(tokens_per_minute=100) as http:
        body = {"prompt": "x" * 8000}
        statuses = [(await http.post("/tokenize", json=body)).status_code for _ in range(3)]
    assert statuses == [200, 429, 429]


async def test_too_long_prompt_is_refused_before_it_is_tokenised() -> None:
    engine = FakeEngine()
    engine.tokenizer.encode = None  # type: ignore[assignment, method-assign]
    transport = httpx.ASGITransport(app=create_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        reply = await http.post(COMPLETIONS, json={"prompt": " " * 4_000_000})
    assert reply.status_code == 400 and "256 tokens" in reply.json()["error"]["message"]


@pytest.mark.parametrize("text", ["[]", "{}", '{"a":[]}', '"a",[]'])
def test_too_many_values_are_counted_without_parsing(text: str) -> None:
    body = ("[" + ",".join([text] * (MAX_CONTAINERS + 1)) + "]").encode()
    with pytest.raises(ApiError, match="too many"):
        check_json_bounds(body, max_values=10**9)


def test_separators_inside_of_texts_are_not_counted() -> None:
    hostile = '[{,:"\\' * 100_000 + "\\\\"
    check_json_bounds(json.dumps({"prompt": hostile, "stop": ["\\", '"']}).encode(), max_values=10)


@pytest.mark.parametrize("name", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_tokenised(name: str) -> None:
    tokenizer = load_tokenizer("demo")
    given = " " * 1_000_000 if name == "encode" else [5] * 1_000_000
    thread = threading.Thread(target=getattr(tokenizer, name), args=(given,))
    thread.start()
    turns = 0
    while thread.is_alive():
        turns += 1
    assert turns > 1000  # with the GIL held, this thread would get a turn or two


async def test_a_probe_waits_for_one_large_body_and_not_for_all() -> None:
    """Bodies that are ready together are validated with a turn of the loop between any two."""
    turns, ended, num_iterations = BodyTurns(), [], 0

    async def read() -> None:
        await turns.parse(lambda: None)
        ended.append(num_iterations)

    bodies = asyncio.gather(*(read() for _ in range(50)))
    while not bodies.done():
        num_iterations += 1
        await asyncio.sleep(0)
    assert len(ended) == len(set(ended)) == 50


async def test_a_body_that_cannot_be_parsed_ends_its_turn() -> None:
    turns = BodyTurns()
    with pytest.raises(ZeroDivisionError):
        await turns.parse(lambda: 1 // 0)
    assert await asyncio.wait_for(turns.parse(lambda: 1), 10) == 1


async def test_long_lists_of_tokens_are_charged_before_they_are_decoded() -> None:
    async with client() as http:
        tokens = [65] * 8000
        reply = await http.post("/detokenize", json={"tokens": tokens})
        assert reply.json()["prompt"] == "A" * 8000
    charged: list[int] = []
    reader = PromptReader(CharTokenizer(), 100, charged.append)
    assert await reader.decode(tokens) == "A" * 8000
    assert charged == [8000 // CharTokenizer.max_token_chars]


def test_text_with_too_many_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.engine.tokenization.tokenizer.MAX_TEXT_TOKENS", 4)
    with pytest.raises(BadInput, match="too many tokens"):
        load_tokenizer("demo").encode("def add(a, b):\n    return a + b\n")


def test_bodies_that_are_held_are_bounded_in_all_and_for_each_key() -> None:
    memory = BodyMemory(max_bytes=100, max_bytes_per_key=60)
    first, second = memory.reserve("alice"), memory.reserve("bob")
    first.add(60)
    for key, num_bytes in (("alice", 1), ("bob", 41)):
        with pytest.raises(ApiError) as refusal:
            memory.reserve(key).add(num_bytes)
        assert refusal.value.status_code == 503
    second.add(40)
    first.close()
    assert memory.num_bytes == 40
    memory.reserve("alice").add(60)


async def test_log_probabilities_of_prompts_are_bounded() -> None:
    async with client() as http:
        body = {"prompt": [[65] * 200] * 32, "prompt_logprobs": 20, "max_tokens": 1}
        reply = await http.post(COMPLETIONS, json=body)
        assert reply.status_code == 400 and "prompt_logprobs" in reply.text
        body["prompt_logprobs"] = 0
        assert (await http.post(COMPLETIONS, json=body)).status_code == 200


async def test_log_probabilities_of_a_whole_response_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = msgspec.structs.replace(LIMITS, max_held_logprobs=8)
    monkeypatch.setattr("ridgeline.serve.generation.collect.LIMITS", limits)
    async with client() as http:
        body = {"prompt": "x", "n": 2, "logprobs": 0, "max_tokens": 8}
        reply = await http.post(COMPLETIONS, json=body)
        assert reply.status_code == 400 and "log-probabilities" in reply.text
        for fields in ({"max_tokens": 4}, {"stream": True}, {"logprobs": None}):
            assert (await http.post(COMPLETIONS, json=body | fields)).status_code == 200


async def test_priority_is_bounded_for_each_key(tmp_path: Path) -> None:
    user, user_entry = new_key("user")
    admin, admin_entry = new_key("admin")
    batch, batch_entry = new_key("late")
    keys = tmp_path / "keys.toml"
    keys.write_text(f"{user_entry}{admin_entry}admin = true\n{batch_entry}min_priority = 5\n")
    async with client(api_keys_file=str(keys)) as http:
        for key, priority, status in (
            (user, -1, 400), (user, 0, 200), (admin, -100, 200), (batch, 4, 400), (batch, 5, 200)
        ):  # fmt: skip
            headers = {"authorization": f"Bearer {key}"}
            body = {"prompt": "x", "max_tokens": 1, "priority": priority}
            reply = await http.post(COMPLETIONS, json=body, headers=headers)
            assert reply.status_code == status, (priority, reply.text)


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "null"])
async def test_malformed_origin_is_refused(origin: str) -> None:
    async with client() as http:
        assert (await http.get("/health", headers={"origin": origin})).status_code == 403


async def test_text_behind_an_address_in_the_host_is_refused() -> None:
    async with client() as http:
        assert (await http.get("/health", headers={"host": "[::1].evil.com"})).status_code == 400
        assert (await http.get("/health", headers={"host": "[::1]:80"})).status_code == 200
        twice = [("host", "localhost"), ("host", "localhost")]
        assert (await http.get("/health", headers=twice)).status_code == 400
