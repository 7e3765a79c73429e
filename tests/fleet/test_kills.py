"""kill -9 of replicas under load: every answer is complete and right, byte by byte."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ridgeline.engine.parallel.nodes import WORKER_MODULE
from tests.compress.small_llama import random_tensors, write
from tests.fleet.answers import REQUESTS
from tests.fleet.kill_load import KillReport, fetch, kill_replicas
from tests.fleet.processes import GatewayProcess, Replica, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Replica]]:
    started = [Replica(), Replica()]
    for replica in started:
        replica.start()
    for replica in started:
        replica.wait_ready()
    yield started
    for replica in started:
        replica.kill()


@pytest.fixture(scope="module")
def gateway(replicas: list[Replica]) -> Iterator[GatewayProcess]:
    process = GatewayProcess([replica.url for replica in replicas], policy="least-loaded")
    wait_until(process.is_ready)
    yield process
    process.stop()


async def run_with_kills(
    gateway: GatewayProcess, replicas: list[Replica], num_kills: int, num_clients: int
) -> KillReport:
    """Kill random replicas while clients send requests of every kind in turn."""
    async with httpx.AsyncClient(base_url=replicas[0].url, timeout=60) as http:
        right = {name: await fetch(http, name) for name in REQUESTS}
    report, is_over = KillReport(), asyncio.Event()
    async with httpx.AsyncClient(base_url=gateway.url, timeout=120) as http:
        clients = [
            asyncio.create_task(report.ask_until(http, right, i, is_over))
            for i in range(num_clients)
        ]
        await kill_replicas(replicas, num_kills, random.Random(1))
        is_over.set()
        await asyncio.gather(*clients)
    return report


async def test_no_answer_is_lost_or_changed_by_kills(
    gateway: GatewayProcess, replicas: list[Replica]
) -> None:
    began_s = time.monotonic()
    report = await run_with_kills(gateway, replicas, num_kills=30, num_clients=6)
    print(f"{report.num_answers.total()} answers, 30 kills, {time.monotonic() - began_s:.0f} s")
    assert not report.wrong, report.wrong[:3]
    assert report.num_answers.total() >= 30
    assert gateway.metric("ridgeline_fleet_resumed_total") >= 5
    assert gateway.metric("ridgeline_fleet_lost_total") == 0


def ranks_of(replica: Replica) -> list[int]:
    """Process ids of the ranks that a server has started."""
    assert replica.process is not None
    tasks = Path(f"/proc/{replica.process.pid}/task").glob("*/children")
    children = [pid for task in tasks for pid in task.read_text(encoding="ascii").split()]
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
    return sorted(pid for pid, command in commands.items() if WORKER_MODULE in command)


def write_mixture(folder: Path) -> Path:
    """A random Mixtral with the demo's tokenizer."""
    generator = torch.Generator().manual_seed(3)
    tensors = {name: t for name, t in random_tensors().items() if ".mlp." not in name}
    for layer in range(4):
        at = f"model.layers.{layer}.block_sparse_moe."
        shapes = {"gate": (8, 48)}
        for expert in range(8):
            shapes |= {f"experts.{expert}.w{i}": (64, 48) for i in (1, 3)}
            shapes[f"experts.{expert}.w2"] = (48, 64)
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator) / shape[1] ** 0.5
            tensors[f"{at}{name}.weight"] = values.bfloat16()
    changes = {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2}
    sizes = {"max_position_embeddings": 1024}
    return write(folder, tensors, model_type="mixtral", **changes, **sizes)


async def check_that_streams_outlive_a_rank(
    whole: Replica, settings: dict[str, Any], names: list[str]
) -> None:
    """The server of a killed rank can compute nothing more: it ends, for another to be started."""
    parallel = Replica({"kv_cache_memory_bytes": 32 << 20, "num_threads": 1, **settings})
    parallel.start()
    parallel.wait_ready()
    gateway = GatewayProcess([parallel.url, whole.url], policy="round-robin")
    wait_until(gateway.is_ready)
    try:
        async with httpx.AsyncClient(base_url=whole.url, timeout=60) as http:
            right = [await fetch(http, name) for name in names]
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
            streams = [asyncio.create_task(fetch(http, name)) for name in names]
            await asyncio.sleep(0.3)
            ranks = ranks_of(parallel)
            os.kill(ranks[-1], signal.SIGKILL)
            assert await asyncio.gather(*streams) == right
        assert gateway.metric("ridgeline_fleet_resumed_total") >= 1
        assert gateway.metric("ridgeline_fleet_lost_total") == 0
        assert parallel.process is not None
        parallel.process.join(20)
        assert parallel.process.exitcode == 1
        assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    finally:
        gateway.stop()
        parallel.kill()


async def test_streams_outlive_a_rank_and_its_server_exits(replicas: list[Replica]) -> None:
    names = ["greedy", "sampled", "penalised", "structured"]
    settings = {"model": "demo", "pipeline_parallel_size": 2}
    await check_that_streams_outlive_a_rank(replicas[0], settings, names)


async def test_streams_outlive_a_rank_of_experts_and_contexts(tmp_path: Path) -> None:
    """Four ranks with two experts each, two for the heads and two for the positions."""
    model = {"model": str(write_mixture(tmp_path / "mixture")), "max_model_len": 1024}
    whole = Replica({"kv_cache_memory_bytes": 32 << 20, "layer_backend": "torch", **model})
    whole.start()
    whole.wait_ready()
    sizes = {"tensor_parallel_size": 2, "context_parallel_size": 2, "expert_parallel_size": 4}
    try:
        names = ["greedy", "sampled", "choices"]
        await check_that_streams_outlive_a_rank(whole, {**model, **sizes}, names)
    finally:
        whole.kill()
