"""No request holds the engine's thread, or the event loop over a real engine, for long.

Between two steps the engine's thread executes commands and at most one piece of other work; a step
has a token budget, whatever its rows ask for. All of it is measured in CPU time of the thread, next
to the loop's callbacks, for the most expensive requests within the documented limits.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from ridgeline.engine.engine import Engine
from ridgeline.engine.engine_loop import EngineLoop
from ridgeline.serve.app import create_app
from tests.conformance.tiny_models import make_model
from tests.serve.loop_time import CallbackTimes, callback_times
from tests.serve.test_rerank import save_tokenizer
from tests.serve.test_stall import ROUTES

MAX_HELD_S = 0.05
TRIES = 3
"""A request that holds a thread for longer is sent again: on a busy machine, caches are cold."""

IDS = [(7 * i) % 4000 + 1 for i in range(1000)]
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 6, "temperature": 0}
OPTIONAL = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(800)}}
NESTED = {"type": "array", "items": {"type": "array", "items": {"type": "array", "items": {}}}}


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    schema = {"name": "a", "schema": schema}
    return {**CHAT, "response_format": {"type": "json_schema", "json_schema": schema}}


EXPENSIVE: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": IDS, "max_tokens": 1, "prompt_logprobs": 20},
        {"prompt": IDS, "max_tokens": 4, "n": 64, "logprobs": 20, "seed": 1},
        {"prompt": "a", "max_tokens": 4, "n": 32, "use_beam_search": True},
        {"prompt": "a", "max_tokens": 6, "guided_regex": "(a|b|c|d){1900}"},
        {"prompt": "a", "max_tokens": 6, "guided_regex": "a*" * 1500},
        {"prompt": "a", "max_tokens": 4, "logit_bias": {str(i): 1 for i in range(300)}},
        {
            "prompt": "a",
            "max_tokens": 4,
            "n": 16,
            "guided_choice": [f"word {i}" for i in range(500)],
        },
    ],
    "/v1/chat/completions": [
        _schema(OPTIONAL),
        _schema(NESTED),
        _schema({"enum": [f"value {i}" for i in range(3000)]}),
    ],
    "/v1/responses": [{"input": "a b " * 400, "max_output_tokens": 16}],
    "/v1/messages": [{**CHAT, "model": "demo"}],
    "/v1/embeddings": [{"input": [IDS, IDS[1:]]}],
    "/invocations": [{"prompt": IDS, "max_tokens": 1, "prompt_logprobs": 20}],
    "/v1/cache/warm": [{"prompt": "a b " * 400}],
    "/v1/cache/forget": [{"prompt": "a b " * 400}],
}
REFUSED = {("/v1/completions", 4)}  # in its first step: its mask would take too long
PAIRS: dict[str, dict[str, Any]] = {
    "/v1/rerank": {"query": "a b " * 20, "documents": ["a word " * 60] * 300},
    "/v1/score": {"text_1": "a b " * 20, "text_2": ["a word " * 60] * 300},
}
PAIRS |= {
    "/rerank": PAIRS["/v1/rerank"],
    "/v2/rerank": PAIRS["/v1/rerank"],
    "/score": PAIRS["/v1/score"],
}
"""Sent to a reranker: the demo model has no tokens for pairs of texts."""
WITHOUT_ENGINE = {
    "/v1/responses/input_tokens", "/v1/messages/count_tokens", "/tokenize", "/detokenize",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter",  # in a thread of their callers
    "/v1/batches",  # which runs requests of other routes
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20}
    with Engine.open("demo", num_threads=1, **sizes) as engine:  # type: ignore[arg-type]
        engine.warm_up_grammars()
        yield engine


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("reranker")
    make_model("qwen3", path, vocab_size=300, max_position_embeddings=1024)
    save_tokenizer(path)
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20}
    with Engine.open(str(path), num_threads=1, **sizes) as engine:  # type: ignore[arg-type]
        yield engine


@asynccontextmanager
async def client_of(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client,
    ):
        yield client


@pytest.fixture
def engine_times(monkeypatch: pytest.MonkeyPatch) -> CallbackTimes:
    """The longest step, piece of other work, or set of commands on the engine's thread."""
    times = CallbackTimes()

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any) -> Any:
            began_s = time.thread_time()
            result = function(*arguments)
            times.longest_s = max(times.longest_s, time.thread_time() - began_s)
            return result

        return wrapper

    for name in ("step", "_run_call", "_execute_commands"):
        monkeypatch.setattr(EngineLoop, name, timed(getattr(EngineLoop, name)))
    return times


CASES = [(path, index) for path, bodies in EXPENSIVE.items() for index in range(len(bodies))]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "index"), CASES)
async def test_no_request_holds_the_thread_of_the_engine(
    path: str, index: int, engine: Engine, engine_times: CallbackTimes
) -> None:
    status = 400 if (path, index) in REFUSED else 200
    await check_held(engine, path, EXPENSIVE[path][index], engine_times, status)


@pytest.mark.slow
@pytest.mark.parametrize("path", PAIRS)
async def test_no_pairs_of_texts_hold_the_thread_of_the_engine(
    path: str, reranker: Engine, engine_times: CallbackTimes
) -> None:
    await check_held(reranker, path, PAIRS[path], engine_times, status=200)


async def check_held(
    engine: Engine, path: str, body: dict[str, Any], engine_times: CallbackTimes, status: int
) -> None:
    held: list[tuple[float, float]] = []
    async with client_of(engine) as http:
        with callback_times() as loop_times:
            for _ in range(TRIES):
                content = json.dumps(body)
                await asyncio.sleep(0)  # the callback that made the body ends here
                engine_times.reset()
                loop_times.reset()
                reply = await http.post(path, content=content)
                await asyncio.sleep(0)  # the last callback of the request ends here
                assert reply.status_code == status, reply.text[:200]
                held.append((engine_times.longest_s, loop_times.longest_s))
                if max(held[-1]) < MAX_HELD_S:
                    break
    assert min(map(max, held)) < MAX_HELD_S, held


def test_every_route_is_measured_or_uses_no_engine() -> None:
    assert {route.path for route in ROUTES} == {*EXPENSIVE, *PAIRS, *WITHOUT_ENGINE}
