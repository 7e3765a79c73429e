"""Every counter equals what clients received, to the last token, whatever the clients did.

A random load over the real engine with speculative decoding and a prefix cache: four APIs, whole
and streamed, several prompts and choices, stop strings, scoring, grammars, bad requests, refused
keys, clients that disconnect, and a batch at the same time. A client that disconnects does not know
what was generated for it: for those, the test records the events that the engine passes to the
server.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.engine.engine import Engine
from ridgeline.errors import RidgelineError
from ridgeline.records import Event, Finished, Started, Token
from ridgeline.serve.app import create_app
from ridgeline.serve.batch.attach import BatchOptions, attach_batches
from ridgeline.serve.batch.executor import background_engine
from tests.serve.batch.helpers import jsonl
from tests.serve.conftest import running

KEY = {"authorization": "Bearer secret"}
TEXTS = ("import os\n" * 12, "def add(a, b):\n    return a + b\n" * 4, "class Point:\n", "x = 1\n")
MODEL = '{model_name="demo"}'
NUM_REQUESTS = 80
Sink = Callable[[Sequence[Event]], None]


class EventRecorder:
    """Records the events of every interactive request."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.inner_listen = engine, engine.listen
        self.tokens: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.prompts: dict[str, tuple[int, int]] = {}  # prompt tokens, cached tokens

    async def listen(self, prompt: Any, sampling: Any, sink: Sink, **terms: Any) -> Any:
        if terms.get("background"):
            return await self.inner_listen(prompt, sampling, sink, **terms)
        name = terms["request_id"]

        def record(events: Sequence[Event]) -> None:
            for event in events:
                self.tokens[name] += isinstance(event, Token)
                self.ended[name] += isinstance(event, Finished)
                if isinstance(event, Started):
                    self.prompts[name] = len(prompt), event.cached_tokens
            sink(events)

        self.tokens[name] += 0
        try:
            return await self.inner_listen(prompt, sampling, record, **terms)
        except RidgelineError:
            del self.tokens[name]  # refused: neither finished nor aborted
            raise


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    sizes = {"max_num_seqs": 8, "kv_cache_memory_bytes": 8 << 20, "max_model_len": 512}
    with Engine.open("demo", speculative_config=drafts, **sizes) as opened:
        yield opened


@pytest.fixture
def recorder(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> EventRecorder:
    recorder = EventRecorder(engine)
    monkeypatch.setattr(engine, "listen", recorder.listen)
    return recorder


@pytest.fixture
async def http(
    engine: Engine, recorder: EventRecorder, tmp_path: Path
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, ServerOptions(api_key="secret"))
    options = BatchOptions(store=tmp_path / "batches.sqlite", max_concurrency=4, poll_s=0.02)
    line_app = create_app(background_engine(engine))
    attach_batches(app, line_app, options)
    limits = httpx.Limits(max_connections=40)
    with running(app) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60, headers=KEY, limits=limits) as made:
            yield made


class Received:
    """Sums of the usage that clients received, and ids of the responses they read to the end."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()
        self.ids: set[str] = set()

    def add(self, response: dict[str, Any], usage: dict[str, Any], num_choices: int) -> None:
        cached = usage.get("cache_read_input_tokens", 0)
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        self.ids.add(response["id"])
        self.sums["choices"] += num_choices
        self.sums["prompt"] += usage.get("prompt_tokens", usage.get("input_tokens", 0)) + cached
        self.sums["cached"] += cached or details.get("cached_tokens", 0)
        self.sums["output"] += usage.get("completion_tokens", usage.get("output_tokens", 0))

    def was_read(self, request: str) -> bool:
        """Whether a client read this request's response (`ID`, or `ID-2` of several prompts)."""
        return request in self.ids or request.rpartition("-")[0] in self.ids


def random_request(rng: random.Random) -> tuple[str, dict[str, Any], int]:
    """Path, body, and number of choices."""
    text = rng.choice(TEXTS)
    max_tokens, temperature = rng.randint(1, 24), rng.choice((0.0, 1.0))
    stop = rng.choice((None, ["\n\n"], ["return", "import"]))
    chat = [{"role": "user", "content": text}]
    n = rng.randint(1, 3)
    kind = rng.randrange(6)
    body: dict[str, Any] = {"model": "demo", "max_tokens": max_tokens, "temperature": temperature}
    if kind == 0:
        prompts = [rng.choice(TEXTS) for _ in range(rng.randint(1, 3))]
        more = {"prompt": prompts, "n": n, "stop": stop, "seed": rng.randrange(99)}
        return "/v1/completions", body | more, n * len(prompts)
    if kind == 1:
        return "/v1/chat/completions", body | {"messages": chat, "n": n, "stop": stop}, n
    if kind == 2:
        return "/v1/messages", body | {"messages": chat, "stop_sequences": stop}, 1
    if kind == 3:
        del body["max_tokens"]
        return "/v1/responses", body | {"input": text, "max_output_tokens": max_tokens}, 1
    if kind == 4:
        return "/v1/completions", body | {"prompt": text, "guided_choice": ["yes", "no way"]}, 1
    scoring = {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 1}
    return "/v1/completions", body | scoring, 1


async def read_response(http: httpx.AsyncClient, received: Received, rng: random.Random) -> None:
    """Read a response to its end, streamed or whole."""
    path, body, num_choices = random_request(rng)
    if rng.random() < 0.5:
        reply = await http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        received.add(reply.json(), reply.json()["usage"], num_choices)
        return
    if "completions" in path:
        body["stream_options"] = {"include_usage": True}
    reply = await http.post(path, json=body | {"stream": True})
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    usages = [e.get("usage") or e.get("response", {}).get("usage") for e in events]
    answer = events[0].get("message") or events[0].get("response") or events[0]
    received.add(answer, [usage for usage in usages if usage][-1], num_choices)


async def disconnect(http: httpx.AsyncClient, rng: random.Random) -> None:
    """Disconnect in the middle of a stream, or before a whole response is complete."""
    body = {"prompt": TEXTS[rng.randrange(4)], "max_tokens": 300, "ignore_eos": True, "n": 2}
    if rng.random() < 0.5:
        async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
            await anext(reply.aiter_lines())
            await asyncio.sleep(rng.random() * 0.05)
        return
    posting = asyncio.ensure_future(http.post("/v1/completions", json=body))
    await asyncio.sleep(rng.random() * 0.2)
    posting.cancel()
    await asyncio.gather(posting, return_exceptions=True)


async def send_bad_request(http: httpx.AsyncClient, received: Received, rng: random.Random) -> None:
    """400 from the server, 400 from the engine, 401."""
    kind = rng.randrange(3)
    bodies = ({"prompt": "x", "n": 0}, {"prompt": "x " * 999}, {"prompt": "x"})
    headers = {"authorization": "Bearer wrong"} if kind == 2 else KEY
    reply = await http.post("/v1/completions", json=bodies[kind], headers=headers)
    assert reply.status_code == (401 if kind == 2 else 400)
    received.sums["unauthorized"] += kind == 2


async def run_batch(http: httpx.AsyncClient) -> Counter[str]:
    """Run a batch; the sums of its usage."""
    bodies = [{"model": "demo", "prompt": TEXTS[i % 4], "max_tokens": 6} for i in range(12)]
    bodies[5]["temperature"] = -1
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    form = {"files": {"file": ("in.jsonl", jsonl(*lines))}, "data": {"purpose": "batch"}}
    file = (await http.post("/v1/files", **form)).json()  # type: ignore[arg-type]
    new = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "1h"}
    batch = (await http.post("/v1/batches", json=new)).json()
    async with asyncio.timeout(60):
        while batch["status"] != "completed":
            await asyncio.sleep(0.05)
            batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
    text = (await http.get(f"/v1/files/{batch['output_file_id']}/content")).text
    usages = [json.loads(line)["response"]["body"]["usage"] for line in text.splitlines()]
    assert len(usages) == 11 and batch["request_counts"]["failed"] == 1
    return Counter(
        prompt=sum(usage["prompt_tokens"] for usage in usages),
        completion=sum(usage["completion_tokens"] for usage in usages),
    )


async def scrape(http: httpx.AsyncClient) -> dict[str, float]:
    text = (await http.get("/metrics")).text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


@pytest.mark.slow
async def test_counters_equal_what_clients_received(
    http: httpx.AsyncClient, engine: Engine, recorder: EventRecorder
) -> None:
    rng, received = random.Random(), Received()
    before = await scrape(http)
    gate = asyncio.Semaphore(12)

    async def one(seed: int) -> None:
        rng_ = random.Random(seed)
        async with gate:
            kind = rng_.random()
            if kind < 0.7:
                await read_response(http, received, rng_)
            elif kind < 0.88:
                await disconnect(http, rng_)
            else:
                await send_bad_request(http, received, rng_)

    requests = [one(rng.randrange(2**32)) for _ in range(NUM_REQUESTS)]
    batch, *_ = await asyncio.gather(run_batch(http), *requests)
    async with asyncio.timeout(20):
        while engine.counters()["num_requests_running"] or engine.counters()["num_queued"]:
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)
    after = await scrape(http)
    increase = Counter({name: after[name] - before.get(name, 0.0) for name in after})
    check(increase, received, recorder, batch)
    assert engine.counters()["kv_cache_usage_perc"] == 0 and engine.is_healthy()
    assert engine.counters()["spec_decode_num_accepted_tokens"] > 0


def check(
    increase: Counter[str], received: Received, recorder: EventRecorder, batch: Counter[str]
) -> None:
    """Requests that were read count by their usage, the others by their recorded events."""
    unread = [request for request in recorder.tokens if not received.was_read(request)]
    started = [recorder.prompts.get(request, (0, 0)) for request in unread]
    finished = sum(recorder.ended[request] for request in unread)
    assert unread and received.ids

    def counted(name: str) -> float:
        return increase[f"vllm:{name}{MODEL}"]

    def ended(reason: str) -> float:
        return increase[
            f'vllm:request_success_total{{finished_reason="{reason}",model_name="demo"}}'
        ]

    output = received.sums["output"] + sum(recorder.tokens[request] for request in unread)
    assert counted("generation_tokens_total") == output
    assert counted("prompt_tokens_total") == received.sums["prompt"] + sum(n for n, _ in started)
    assert counted("prompt_tokens_cached_total") == received.sums["cached"] + sum(
        c for _, c in started
    )
    assert ended("stop") + ended("length") == received.sums["choices"] + finished
    assert ended("abort") == 2 * len(unread) - finished  # each of them has two choices
    assert counted("e2e_request_latency_seconds_count") == received.sums["choices"] + finished
    refused = 'ridgeline_requests_refused_total{model_name="demo",reason="key"}'
    assert increase[refused] == received.sums["unauthorized"]
    for kind in ("prompt", "completion"):
        assert increase[f'ridgeline_batch_tokens_total{{kind="{kind}"}}'] == batch[kind]
        charged = increase[f'ridgeline_batch_charged_tokens_total{{kind="{kind}"}}']
        assert charged == batch[kind] / 2
