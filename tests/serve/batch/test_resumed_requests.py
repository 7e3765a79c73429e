"""A batch request that a restart interrupted continues from its tokens, with the same answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.engine.engine import Engine
from ridgeline.serve.app import create_app
from ridgeline.serve.batch.executor import InProcessExecutor, background_engine, with_field
from ridgeline.serve.batch.records import BatchResult, Lease
from ridgeline.serve.batch.store import BatchStore
from tests.serve.batch.helpers import accepted

BODY = {"model": "demo", "prompt": "def f(", "max_tokens": 24, "ignore_eos": True}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 12, "n": 2}
BODIES = {
    "greedy": ("/v1/completions", {**BODY, "temperature": 0}),
    "sampled": ("/v1/completions", {**BODY, "temperature": 0.9}),
    "two prompts": ("/v1/completions", {**BODY, "prompt": ["a = ", "b = "], "temperature": 1}),
    "chat": ("/v1/chat/completions", {**CHAT, "temperature": 0.7, "frequency_penalty": 1}),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open("demo", max_num_seqs=4, kv_cache_memory_bytes=32 << 20) as opened:
        yield opened


@pytest.fixture(scope="module")
def execute(engine: Engine) -> InProcessExecutor:
    app = create_app(background_engine(engine), ServerOptions())
    return InProcessExecutor(app, served="demo")


def lease(endpoint: str, body: dict[str, Any]) -> Lease:
    text = json.dumps({"custom_id": "a", "body": body}).encode()
    return Lease(
        batch_id="batch_1", endpoint=endpoint, place=0, token="t", custom_id="a", text=text
    )


def answer(result: BatchResult) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(result.line)["response"]["body"]
    return {k: v for k, v in body.items() if k not in ("created", "usage", "metrics")}


@pytest.mark.parametrize("name", BODIES)
async def test_interrupted_request_continues_with_the_same_answer(
    execute: InProcessExecutor, name: str
) -> None:
    endpoint, body = BODIES[name]
    whole = lease(endpoint, body)
    expected = await execute(whole)
    tokens = whole.progress.tokens
    assert expected.succeeded and sum(map(len, tokens)) == expected.completion_tokens
    for cut in (1, 5, 11):
        interrupted = lease(endpoint, body)
        interrupted.progress.served = "demo"
        interrupted.progress.tokens = [choice[:cut] for choice in tokens]
        result = await execute(interrupted)
        assert answer(result) == answer(expected)
        assert result.completion_tokens == expected.completion_tokens
        assert interrupted.progress.tokens == tokens


async def test_only_missing_tokens_are_computed(engine: Engine, execute: InProcessExecutor) -> None:
    endpoint, body = BODIES["greedy"]
    whole = lease(endpoint, body)
    await execute(whole)
    before = engine.counters()["num_steps"]
    interrupted = lease(endpoint, body)
    interrupted.progress.served = "demo"
    interrupted.progress.tokens = [whole.progress.tokens[0][:20]]
    await execute(interrupted)
    assert engine.counters()["num_steps"] - before <= 8


async def test_tokens_of_another_model_are_dropped(execute: InProcessExecutor) -> None:
    endpoint, body = BODIES["greedy"]
    expected = await execute(lease(endpoint, body))
    foreign = lease(endpoint, body)
    foreign.progress.served, foreign.progress.tokens = "other", [[1, 2, 3]]
    assert answer(await execute(foreign)) == answer(expected)


async def test_tokens_that_the_model_does_not_have_are_dropped(execute: InProcessExecutor) -> None:
    endpoint, body = BODIES["greedy"]
    expected = await execute(lease(endpoint, body))
    damaged = lease(endpoint, body)
    damaged.progress.served, damaged.progress.tokens = "demo", [[10**9]]
    assert answer(await execute(damaged)) == answer(expected)


@pytest.mark.parametrize("body", [b"{}", b" { } ", b'{"a": 1}\n', b'{"a": "}", "x": [2]}'])
def test_a_field_is_added_to_a_body_that_is_not_parsed(body: bytes) -> None:
    assert json.loads(with_field(body, "x", [1])) == {**json.loads(body), "x": [1]}


@pytest.mark.parametrize("value", ["true", '"true"', "1", "null", "false"])
async def test_a_batch_request_that_would_be_streamed_is_refused(
    value: str, execute: InProcessExecutor
) -> None:
    endpoint, body = BODIES["greedy"]
    streamed = lease(endpoint, {**body, "stream": json.loads(value)})
    refused = b"cannot be streamed" in (await execute(streamed)).line
    assert refused == (value not in ("null", "false"))


def test_store_keeps_progress_over_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "batches.sqlite"
    store = BatchStore(path, owner="one")
    accepted(store, "a", "b")
    first, second = store.lease(2)
    first.progress.tokens, first.progress.served = [[1, 2], [3]], "m"
    assert store.renew([first, second]) == {first.token, second.token}
    second.progress.tokens = [[7]]
    store.release([second])
    store.close()
    store = BatchStore(path, owner="two", clock=lambda: 4e9)  # the first lease has run out
    with store._db.transaction() as db:
        db.execute("UPDATE batches SET expires_at = 5000000000")
    again = {one.place: one.progress for one in store.lease(2)}
    assert again[0].tokens == [[1, 2], [3]] and again[0].served == "m"
    assert again[1].tokens == [[7]]
    store.close()


def test_store_of_the_last_version_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "batches.sqlite"
    store = BatchStore(path)
    with store._db.transaction() as db:
        db.execute("ALTER TABLE lines DROP COLUMN progress")
        db.execute("PRAGMA user_version = 2")
    store.close()
    store = BatchStore(path)
    accepted(store, "a")
    assert store.lease(1)[0].progress.tokens == []
    store.close()


async def test_interrupted_process_is_continued_by_the_next(
    execute: InProcessExecutor, tmp_path: Path
) -> None:
    endpoint, body = BODIES["sampled"]
    expected = await execute(lease(endpoint, body))
    started = lease(endpoint, body)
    task = asyncio.ensure_future(execute(started))
    while sum(map(len, started.progress.tokens)) < 3:
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    continued = lease(endpoint, body)
    continued.progress.served = "demo"
    continued.progress.tokens = [list(choice) for choice in started.progress.tokens]
    assert answer(await execute(continued)) == answer(expected)
