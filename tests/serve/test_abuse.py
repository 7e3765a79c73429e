"""Abuse of the real engine with the demo model: afterwards all blocks are free, it is healthy,
and its output is unchanged.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import torch

from ridgeline.config.server import ServerOptions
from ridgeline.engine.engine import Engine
from ridgeline.records import Sampling
from ridgeline.serve.app import create_app
from tests.serve.conftest import running

PROMPTS = ["import os\n", "def add(a, b):\n", "class Point:\n", "for i in range("]
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
FEW = {
    "max_num_seqs": 8, "kv_cache_memory_bytes": 4 << 20, "max_model_len": 512,
    "max_num_queued_reqs": 30,
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open("demo", **FEW) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with running(create_app(engine, ServerOptions())) as url:
        yield url


async def assert_idle(engine: Engine) -> None:
    """Wait until no request runs; then nothing may be left."""
    async with asyncio.timeout(20):
        while engine.counters()["num_requests_running"] or engine.counters()["num_queued"]:
            await asyncio.sleep(0.01)
    counters = engine.counters()
    assert counters["kv_cache_usage_perc"] == 0
    assert counters["num_requests_waiting"] == counters["num_queued_tokens"] == 0
    assert engine.is_healthy()


async def complete(url: str) -> str:
    body = {"prompt": PROMPTS[0], **GREEDY}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        return str((await http.post("/v1/completions", json=body)).json()["choices"][0]["text"])


async def disconnect(url: str, rng: random.Random) -> None:
    """Send a request or a part of it, read a little or nothing, and disconnect."""
    host, port = urlsplit(url).netloc.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    fields = {
        "prompt": rng.sample(PROMPTS, rng.randint(1, 4)),
        "max_tokens": rng.randint(1, 300),
        "stream": rng.random() < 0.5,
        "n": rng.randint(1, 2),
        "ignore_eos": True,
    }
    body = json.dumps(fields)
    raw = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    sent = (raw + body).encode()
    cut = len(sent) if rng.random() < 0.8 else rng.randint(1, len(sent))
    writer.write(sent[:cut])
    await asyncio.sleep(rng.random() * 0.05)
    if rng.random() < 0.3:
        await asyncio.wait({asyncio.create_task(reader.read(200))}, timeout=0.05)
    if rng.random() < 0.5:
        linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # on, 0 s: close by reset
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()


@pytest.mark.slow
async def test_200_random_disconnects_leave_nothing_behind(url: str, engine: Engine) -> None:
    before, rng = await complete(url), random.Random(11)
    for _ in range(10):
        await asyncio.gather(*(disconnect(url, rng) for _ in range(20)))
    await assert_idle(engine)
    assert await complete(url) == before


@pytest.mark.slow
async def test_10000_cancelled_streams_leave_nothing_behind(engine: Engine) -> None:
    """Directly on the engine: streams that are closed before, while and after they start."""
    rng, sampling = random.Random(5), Sampling(max_tokens=50, ignore_eos=True)

    async def start_and_close(index: int) -> None:
        stream = engine.stream([5, 6, 7], sampling, request_id=f"c{index}")
        first = asyncio.ensure_future(anext(stream))
        if rng.random() < 0.02:
            await asyncio.wait({first}, timeout=0.02)
        else:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await stream.aclose()

    for at in range(0, 10_000, 20):
        await asyncio.gather(*(start_and_close(index) for index in range(at, at + 20)))
    await assert_idle(engine)


@pytest.mark.slow
async def test_full_queue_gives_503_with_retry_after(url: str, engine: Engine) -> None:
    body = {"prompt": PROMPTS[1], "max_tokens": 60, "ignore_eos": True}
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        requests = (http.post("/v1/completions", json=body) for _ in range(80))
        replies = await asyncio.gather(*requests)
        statuses = sorted({reply.status_code for reply in replies})
        assert statuses == [200, 503]
        for reply in replies:
            if reply.status_code == 503:
                assert 1 <= int(reply.headers["retry-after"]) <= 60
                assert "max-num-queued-reqs" in reply.json()["error"]["message"]
        served = sum(reply.status_code == 200 for reply in replies)
        assert 30 <= served < 80
        refused = engine.counters()["refused_requests"]
        assert refused >= 80 - served
    await assert_idle(engine)


@pytest.mark.slow
async def test_more_sequences_than_blocks_all_finish(url: str, engine: Engine) -> None:
    """Every sequence needs half of the KV cache: some are preempted, and all finish."""
    tokens = engine.info.num_blocks * engine.info.block_size
    long = min(tokens // 2, engine.info.max_model_len - 20)
    before = engine.counters()["num_preemptions"]
    body = {"prompt": PROMPTS[2], "max_tokens": long, "ignore_eos": True, "temperature": 0}
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        replies = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(5)))
    texts = {reply.json()["choices"][0]["text"] for reply in replies}
    assert len(texts) == 1 and all(reply.status_code == 200 for reply in replies)
    assert engine.counters()["num_preemptions"] >= before
    await assert_idle(engine)


@pytest.mark.slow
async def test_nan_logits_fail_only_their_request(
    url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison = engine.tokenizer.encode(PROMPTS[3])[-1]
    runner = engine._loop.runner
    real = runner.decoder.hidden

    def spoiled(tokens_T: torch.Tensor, *rest: object) -> torch.Tensor:
        x_TC = real(tokens_T, *rest)
        return x_TC.masked_fill((tokens_T == poison).unsqueeze(1), float("nan"))

    expected = await complete(url)
    monkeypatch.setattr(runner.decoder, "hidden", spoiled)
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        good, bad = await asyncio.gather(
            http.post("/v1/completions", json={"prompt": PROMPTS[0], **GREEDY}),
            http.post("/v1/completions", json={"prompt": PROMPTS[3], **GREEDY}),
        )
    monkeypatch.undo()
    assert bad.status_code == 500 and "0x" not in bad.text
    assert good.status_code == 200 and good.json()["choices"][0]["text"] == expected
    await assert_idle(engine)


def rss_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


@pytest.mark.slow
async def test_memory_and_open_files_stay_flat(url: str, engine: Engine) -> None:
    """Requests of every kind: memory grows by a few MiB at most after a warm-up."""

    async def round_of(http: httpx.AsyncClient, index: int) -> None:
        body = {"prompt": f"{index} {PROMPTS[index % 4]}", "max_tokens": 2}
        kinds = (
            ("/v1/completions", body),
            ("/v1/completions", {**body, "stream": True}),
            ("/v1/completions", {**body, "guided_choice": [f"a{index}", "b"]}),
            ("/v1/completions", {**body, "temperature": -1}),
            ("/tokenize", {"prompt": "x"}),
        )
        await asyncio.gather(*(http.post(path, json=fields) for path, fields in kinds))

    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        for index in range(60):
            await round_of(http, index)
        gc.collect()
        rss, files = rss_bytes(), len(list(Path("/proc/self/fd").iterdir()))
        for index in range(60, 120):
            await round_of(http, index)
        gc.collect()
        grown = rss_bytes() - rss
        assert len(list(Path("/proc/self/fd").iterdir())) <= files + 5
    assert grown < 24 << 20, f"{grown / 2**20:.1f} MiB"
    await assert_idle(engine)
