"""A stream has the text, log-probabilities, token ids, finish reason and usage of the response:
random requests, with speculative decoding."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from ridgeline.config.server import ServerOptions
from ridgeline.engine.engine import Engine
from ridgeline.serve.app import create_app

NUM_REQUESTS = 40
TEXT = (
    "import os\n\ndef add(a, b):\n    return a + b  # naïve: 你 and 👩‍👩‍👧\n"
    "\n\nclass Point:\n    pass\n"
)
STOPS = ["\n", "self", "e", " ", "import", "()", "\n    ", "def ", "ü"]


@pytest.fixture(scope="module")
def app() -> Iterator[FastAPI]:
    drafter = {"method": "suffix", "num_speculative_tokens": 4}
    with Engine.open(
        "demo", max_num_seqs=8, kv_cache_memory_bytes=32 << 20, speculative_config=drafter
    ) as engine:
        yield create_app(engine, ServerOptions())


def some(rng: random.Random, **fields: Any) -> dict[str, Any]:
    """A random subset of the fields."""
    return {name: value for name, value in fields.items() if rng.random() < 0.25}


def shared_fields(rng: random.Random) -> dict[str, Any]:
    temperature = (
        {"temperature": 0} if rng.random() < 0.5 else {"temperature": rng.choice((0.4, 1, 1.7))}
    )
    return {
        "model": "demo",
        "seed": rng.randrange(100),
        "max_tokens": rng.choice((1, 2, 5, 16, 40)),
        **temperature,
        **some(
            rng,
            n=rng.randint(1, 3),
            stop=rng.choices(STOPS, k=rng.randint(1, 4)),
            include_stop_str_in_output=True,
            ignore_eos=True,
            presence_penalty=rng.uniform(-2, 2),
            repetition_penalty=rng.uniform(0.6, 1.8),
            logit_bias={str(rng.randrange(4000)): rng.uniform(-100, 100) for _ in range(3)},
            top_p=rng.uniform(0.05, 1),
            stop_token_ids=[rng.randrange(500) for _ in range(20)],
            skip_special_tokens=False,
            return_token_ids=True,
            return_tokens_as_token_ids=True,
        ),
    }


def text_of(rng: random.Random) -> str:
    begin = rng.randrange(len(TEXT) - 1)
    return TEXT[begin : begin + rng.randint(1, 90)]


def completion(rng: random.Random) -> dict[str, Any]:
    prompt = text_of(rng) if rng.random() < 0.7 else [text_of(rng), text_of(rng)]
    more = some(rng, logprobs=rng.randint(0, 4), echo=True)
    return shared_fields(rng) | {"prompt": prompt} | more


def chat(rng: random.Random) -> dict[str, Any]:
    body = shared_fields(rng) | {"messages": [{"role": "user", "content": text_of(rng)}]}
    body |= some(rng, logprobs=True)
    if rng.random() < 0.3:
        body["response_format"] = {"type": "json_object"}
        body.pop("ignore_eos", None)
    return body


def joined(lines: list[str]) -> tuple[dict[int, dict[str, Any]], Any]:
    """Texts and lists of all chunks, concatenated by choice; and the usage."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for line in lines:
        chunk = json.loads(line)
        usage = chunk.get("usage", usage)
        for entry in chunk["choices"]:
            choice = choices.setdefault(entry["index"], {"text": "", "lists": {}, "end": None})
            choice["text"] += entry.get("text", entry.get("delta", {}).get("content")) or ""
            if entry["finish_reason"]:
                choice["end"] = entry["finish_reason"], entry["stop_reason"]
            for name, value in lists_of(entry):
                choice["lists"].setdefault(name, []).extend(value)
    return choices, usage


def whole(answer: dict[str, Any]) -> tuple[dict[int, dict[str, Any]], Any]:
    """The same of a response that is not streamed."""
    return {
        entry["index"]: {
            "text": entry.get("text", entry.get("message", {}).get("content")) or "",
            "lists": {name: list(value) for name, value in lists_of(entry)},
            "end": (entry["finish_reason"], entry["stop_reason"]),
        }
        for entry in answer["choices"]
    }, answer["usage"]


def lists_of(entry: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    streamed = {**(entry.get("logprobs") or {}), "token_ids": entry.get("token_ids")}
    return [(name, value) for name, value in streamed.items() if value]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "make"), [("/v1/completions", completion), ("/v1/chat/completions", chat)]
)
async def test_stream_equals_whole_response(path: str, make: Any, app: FastAPI) -> None:
    transport = httpx.ASGITransport(app=app)
    num_answers = 0
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        for seed in range(NUM_REQUESTS):
            body = make(random.Random(seed))
            whole_reply = await http.post(path, json={**body, "cache_salt": f"{path} {seed}"})
            streaming = {"stream": True, "stream_options": {"include_usage": True}}
            streamed = await http.post(path, json={**body, **streaming, "cache_salt": f"s {seed}"})
            assert whole_reply.status_code == streamed.status_code in (200, 400), (
                body,
                whole_reply.text,
                streamed.text,
            )
            if whole_reply.status_code == 200:
                data = [
                    line[6:] for line in streamed.text.splitlines() if line.startswith("data: ")
                ]
                assert data.pop() == "[DONE]"
                assert joined(data) == whole(whole_reply.json()), body
                num_answers += 1
    assert num_answers > NUM_REQUESTS / 2
