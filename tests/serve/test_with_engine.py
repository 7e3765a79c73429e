"""The server over the real engine and the demo model."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
import uvicorn

from ridgeline.config.server import ServerOptions
from ridgeline.engine.engine import Engine
from ridgeline.records import Sampling
from ridgeline.serve.app import create_app
from ridgeline.serve.server import listen, url_of, uvicorn_config

PROMPTS = ["import os\n", "def add(a, b):\n", "class Point:\n", "for i in range("]
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open("demo", max_num_seqs=8, kv_cache_memory_bytes=32 << 20) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with listen(ServerOptions(port=0)) as listener:
        server = uvicorn.Server(uvicorn_config(create_app(engine), ServerOptions()))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield url_of(listener)
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(engine: Engine) -> list[str]:
    return [each.text for each in engine.generate(PROMPTS, Sampling(**GREEDY))]


def test_whole_responses_equal_the_engines_output(engine: Engine, client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt=PROMPTS, temperature=0, max_tokens=12, extra_body={"ignore_eos": True}
    )
    assert [choice.text for choice in answer.choices] == expected(engine)
    assert answer.usage is not None and answer.usage.completion_tokens == 12 * len(PROMPTS)


def test_streams_equal_the_engines_output_and_end_with_the_last_token(
    engine: Engine, client: openai.OpenAI
) -> None:
    stream = client.completions.create(
        model="demo",
        prompt=PROMPTS,
        temperature=0,
        max_tokens=12,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    texts, chunks = [""] * len(PROMPTS), 0
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
        chunks += 1
    assert texts == expected(engine)
    assert chunks == 12 * len(PROMPTS)  # one per token: the end comes with the last


def test_logprobs_with_echo_score_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt="import os\nimport sys\n", max_tokens=1, echo=True, logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None
    assert logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs)
    assert logprobs.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs[1:])
    assert "".join(logprobs.tokens).startswith("import os\nimport sys\n")


def test_seed_repeats_and_choices_differ(client: openai.OpenAI) -> None:
    def generate() -> list[str]:
        answer = client.completions.create(
            model="demo", prompt="import ", max_tokens=16, n=3, seed=5, temperature=1.5
        )
        return [choice.text for choice in answer.choices]

    first = generate()
    assert first == generate() and len(set(first)) > 1


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x " * 5000},
        {"prompt": [10**6]},
        {"prompt": "x", "logit_bias": {"1000000": 1}},
        {"prompt": "x", "stop_token_ids": [1000000]},
        {"prompt": "x", "max_tokens": 0},
        {"prompt": "x", "temperature": "NaN"},
    ],
)
def test_requests_that_the_engine_refuses_get_400(url: str, fields: dict[str, object]) -> None:
    for stream in (False, True):
        reply = httpx.post(f"{url}/v1/completions", json={**fields, "stream": stream})
        assert reply.status_code == 400, reply.text
        assert len(reply.json()["error"]["message"]) < 500


@pytest.mark.slow
async def test_health_is_fast_while_the_engine_computes(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        body = {"prompt": PROMPTS * 2, "max_tokens": 100, "ignore_eos": True}
        load = asyncio.create_task(http.post("/v1/completions", json=body))
        await asyncio.sleep(0.1)
        latencies = []
        while not load.done() and len(latencies) < 20:
            began = time.perf_counter()
            assert (await http.get("/health")).status_code == 200
            latencies.append(time.perf_counter() - began)
            await asyncio.sleep(0.02)
        assert (await load).status_code == 200
    assert sorted(latencies)[len(latencies) // 2] < 0.25  # a few ms on an idle machine


@pytest.mark.slow
async def test_disconnect_frees_the_blocks(url: str, engine: Engine) -> None:
    for stream in (False, True):
        body = {"prompt": PROMPTS, "max_tokens": 500, "ignore_eos": True, "stream": stream}
        async with httpx.AsyncClient(base_url=url) as http:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(http.post("/v1/completions", json=body), 0.3)
        async with asyncio.timeout(10):
            while engine.counters()["num_requests_running"]:
                await asyncio.sleep(0.01)
    assert engine.counters()["kv_cache_usage_perc"] == 0
    assert engine.is_healthy()


@pytest.mark.parametrize("temperature", [0, 1])
def test_required_tool_call_fits_its_schema(client: openai.OpenAI, temperature: int) -> None:
    parameters = {
        "type": "object",
        "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["days"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "how many days?"}],
        tools=[tool],  # type: ignore[list-item]
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=temperature,
        seed=1,
        max_tokens=60,  # enough for a call on one line
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "look"
    assert 1 <= json.loads(call.function.arguments)["days"] <= 9


async def test_embedding_survives_a_disconnect(url: str, engine: Engine) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        body = {"input": ["import os", "import os", "class Point:"]}
        logprobs = (await http.post("/v1/embeddings", json=body)).json()
        first, second, third = (entry["embedding"] for entry in logprobs["data"])
        assert first == second != third and len(first) == engine.resolved.spec.hidden_size
        long = {"input": ["x = 1\n" * 100] * 50}
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(http.post("/v1/embeddings", json=long), 0.1)
        assert (await http.post("/v1/embeddings", json=body)).status_code == 200
    assert engine.is_healthy()


async def test_bad_grammar_fails_only_its_request(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 12, "ignore_eos": True}
        alone = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        good, bad = await asyncio.gather(
            http.post("/v1/completions", json=body),
            http.post("/v1/completions", json={"prompt": "x", "guided_regex": "(["}),
        )
    assert bad.status_code == 400 and good.json()["choices"][0]["text"] == alone


def test_maximum_number_of_choices(url: str) -> None:
    options = [f"option {i}" for i in range(2048)]
    body = {"prompt": "x", "max_tokens": 30, "guided_choice": options}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
    assert reply.status_code == 200 and reply.json()["choices"][0]["text"] in options


@pytest.mark.slow
@pytest.mark.parametrize("regex", ["((x){1,100}){100,100}", "((a{1,100}){1,100}){1,100}"])
def test_regex_over_the_limits_is_refused(url: str, regex: str) -> None:
    """The first exceeds the limits at once, the second after some two dozen tokens."""
    body = {"prompt": "x", "max_tokens": 200, "temperature": 0, "guided_regex": regex}
    for _ in range(2):
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
        assert reply.status_code == 400 and "regex" in reply.json()["error"]["message"], reply.text


ODD = "naïve 👩‍👩‍👧 你好, ¡ok! x"


def test_logprob_bytes_of_partial_characters(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1}
    reply = httpx.post(f"{url}/v1/chat/completions", json={**body, "guided_choice": [ODD]})
    *entries, _end = reply.json()["choices"][0]["logprobs"]["content"]
    assert any("\ufffd" in entry["token"] for entry in entries)
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == ODD


@pytest.mark.parametrize("echo", [False, True])
def test_text_offsets_after_partial_characters(url: str, echo: bool) -> None:
    body = {"prompt": ODD, "max_tokens": 80, "logprobs": 0, "guided_choice": [ODD], "echo": echo}
    choice = httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]
    logprobs, text = choice["logprobs"], choice["text"]
    assert text == (ODD * 2 if echo else ODD)
    assert any("\ufffd" in token for token in logprobs["tokens"])
    for token, at in list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[:-1]:
        if "\ufffd" not in token:
            assert text[at : at + len(token)] == token
        else:
            assert not text[at].isascii()  # the character that it is a part of
    assert logprobs["text_offset"][-1] == len(text)


def test_engine_metrics(url: str) -> None:
    httpx.post(f"{url}/v1/completions", json={"prompt": PROMPTS[0] * 20, "max_tokens": 2})
    httpx.post(f"{url}/v1/completions", json={"prompt": PROMPTS[0] * 20, "max_tokens": 2})
    text = httpx.get(f"{url}/metrics").text
    numbers = dict(
        line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("vllm:prefix")
    )
    hits = float(numbers['vllm:prefix_cache_hits_total{model_name="demo"}'])
    queries = float(numbers['vllm:prefix_cache_queries_total{model_name="demo"}'])
    assert 0 < hits <= queries


@pytest.mark.slow
async def test_token_counters_equal_the_usage(url: str) -> None:
    """Requests and tokens of a mixed load, to the last one."""

    async def run(http: httpx.AsyncClient, index: int) -> tuple[int, int, int]:
        body = {
            "prompt": PROMPTS[: 1 + index % 3], "max_tokens": 3 + index, "n": 1 + index % 2,
            "temperature": 1.0, "seed": index, "stream": index % 2 == 0,
        }  # fmt: skip
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        reply = await http.post("/v1/completions", json=body)
        usage = (
            json.loads(reply.text.split("data: ")[-2])["usage"]
            if body["stream"]
            else reply.json()["usage"]
        )
        choices = len(body["prompt"]) * body["n"]  # type: ignore[operator,arg-type]
        return choices, usage["prompt_tokens"], usage["completion_tokens"]

    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        before = await numbers_of(http)
        usages = await asyncio.gather(*(run(http, index) for index in range(12)))
        after = await numbers_of(http)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    choices, prompt_tokens, completion_tokens = (
        sum(column) for column in zip(*usages, strict=True)
    )
    model = '{model_name="demo"}'
    assert grown[f"vllm:prompt_tokens_total{model}"] == prompt_tokens
    assert grown[f"vllm:generation_tokens_total{model}"] == completion_tokens
    assert grown[f"vllm:e2e_request_latency_seconds_count{model}"] == choices
    assert grown[f"ridgeline_time_to_publish_seconds_count{model}"] == completion_tokens
    ended = [name for name in grown if name.startswith("vllm:request_success_total")]
    assert sum(grown[name] for name in ended) == choices
    assert grown[f"ridgeline_step_flops_total{model}"] > 0
    steps = grown[f"ridgeline_steps_total{model}"]
    assert grown[f"vllm:iteration_tokens_total_count{model}"] == steps > 0
    assert 0 < after[f"ridgeline_batch_fill_ratio{model}"] <= 1


async def numbers_of(http: httpx.AsyncClient) -> dict[str, float]:
    text = (await http.get("/metrics")).text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_bodies_of_load_generators_are_accepted(url: str) -> None:
    """The body of `vllm bench serve`: its last chunk must hold the usage."""
    body = {
        "model": "demo", "prompt": "import", "temperature": 0.0, "repetition_penalty": 1.0,
        "max_tokens": 4, "logprobs": None, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    reply = httpx.post(f"{url}/v1/completions", json=body)
    lines = [line for line in reply.text.split("\n\n") if line]
    assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 4
    assert "x-ridgeline-ignored-fields" not in reply.headers


BAD_SCHEMA = {"type": "object", "properties": {"a": {"type": "nope"}}}
BAD_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": BAD_SCHEMA}}
BAD_TOOL = {"type": "function", "function": {"name": "f", "parameters": BAD_SCHEMA}}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("completions", {"prompt": "x", "guided_regex": "("}, "guided_regex"),
        ("completions", {"prompt": "x", "guided_grammar": "start: x"}, "guided_grammar"),
        ("completions", {"prompt": "x", "guided_choice": []}, "guided_choice"),
        ("completions", {"prompt": "x", "structured_outputs": {"regex": "("}},
         "structured_outputs"),
        ("chat/completions", {**CHAT, "guided_json": BAD_SCHEMA}, "guided_json"),
        ("chat/completions", {**CHAT, "response_format": BAD_FORMAT}, "response_format"),
        ("chat/completions", {**CHAT, "response_format": BAD_FORMAT, "stream": True},
         "response_format"),
        ("chat/completions", {**CHAT, "tools": [BAD_TOOL], "tool_choice": "required"}, "tools"),
        ("responses", {"input": "x", "text": {"format": {
            "type": "json_schema", "name": "a", "schema": BAD_SCHEMA}}}, "text.format"),
        ("messages", {**CHAT, "max_tokens": 4, "output_config": {"format": {
            "type": "json_schema", "schema": BAD_SCHEMA}}}, "output_config.format"),
    ],
)  # fmt: skip
def test_unusable_grammar_is_refused_with_the_name_of_its_field(
    url: str, path: str, body: dict[str, object], field: str
) -> None:
    response = httpx.post(f"{url}/v1/{path}", json={"model": "demo", **body})
    error = response.json()["error"]
    assert response.status_code == 400 and "cannot be used: " in error["message"]
    assert field in (error.get("param"), error["message"].partition(":")[0])
