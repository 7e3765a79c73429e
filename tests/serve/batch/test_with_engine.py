"""Batch requests on the real engine: the same output, and no effect on interactive requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.engine.engine import Engine
from ridgeline.records import Finished, Sampling, Token
from ridgeline.serve.app import create_app
from ridgeline.serve.batch.executor import InProcessExecutor, background_engine
from ridgeline.serve.batch.store import BatchStore
from ridgeline.serve.batch.worker import BatchWorker, WorkerOptions
from tests.serve.batch.helpers import created, now, results

GREEDY = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Engine:
    with Engine.open("demo", max_num_seqs=2, kv_cache_memory_bytes=32 << 20) as opened:
        yield opened  # type: ignore[misc]


async def generate(engine: Engine, text: str) -> list[int]:
    tokens = [e.token async for e in engine.stream(text, GREEDY) if isinstance(e, Token)]
    await asyncio.sleep(0.05)
    return tokens


@pytest.mark.slow
async def test_batch_requests_yield_their_slots_and_all_finish(
    engine: Engine, tmp_path: Path
) -> None:
    expected = [await generate(engine, text) for text in ("import os", "def f(x):")]
    store = BatchStore(tmp_path / "batches.sqlite")
    names = [f"line {i} " * (1 + i % 5) for i in range(8)]
    batch = created(store, *names)
    app = create_app(background_engine(engine), ServerOptions(served_model_name="fake"))
    worker = BatchWorker(
        store, InProcessExecutor(app), WorkerOptions(max_concurrency=4, poll_s=0.05)
    )
    working = asyncio.ensure_future(worker.run_until_idle())
    while not engine.counters()["num_background_running"]:
        await asyncio.sleep(0.005)
    assert [await generate(engine, text) for text in ("import os", "def f(x):")] == expected
    await working
    written = results(store, now(store, batch))
    assert sorted(line["custom_id"] for _, line in written) == sorted(names)
    assert {kind for kind, _ in written} == {"output"}
    assert engine.counters()["num_preemptions"] > 0, "no batch request was preempted"
    assert now(store, batch).completion_tokens > 0
    store.close()


async def test_background_request_gets_the_same_output(engine: Engine) -> None:
    events = [e async for e in engine.stream("import os", GREEDY, background=True)]
    assert [e.token for e in events if isinstance(e, Token)] == await generate(engine, "import os")
    assert isinstance(events[-1], Finished)
