"""A thousand failures of servers behind the gateway: answers that are lost or wrong.

Two kinds, counted apart. Cuts: the gateway, a server and its engine in one process; every
connection of a backend breaks after a random number of bytes; for --down-s, new ones break before
their first byte. Kills: SIGKILL of one of three server processes, which is started again. Requests
are greedy, sampled, penalised, structured, with n > 1, and of other APIs; each answer is compared
byte by byte with that of a server that nothing has happened to.

    python benchmarks/bench_kills.py [--cuts 1000] [--kills 1000] [--model smollm2] [--output FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.fleet.answers import REQUESTS
from tests.fleet.cutting import CuttingBackend, real_server, run_with_cuts
from tests.fleet.kill_load import KillReport, fetch, kill_replicas
from tests.fleet.processes import GatewayProcess, Replica, wait_until
from tests.fleet.scripted import gateway_over

NUM_CLIENTS = 6
STEP = 50  # failures between two lines of output


def counted(page: str, report: KillReport, num_failures: int, began_s: float) -> dict[str, Any]:
    def metric(name: str) -> float:
        return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.M)))

    return {
        "failures": num_failures,
        "answers": report.num_answers.total(),
        "answers_by_kind": dict(sorted(report.num_answers.items())),
        "resumed_streams": metric("ridgeline_fleet_resumed_total"),
        "retried_requests": metric("ridgeline_fleet_retried_total"),
        "lost": metric("ridgeline_fleet_lost_total"),
        "called_deadly": sum("backends in a row crashed" in text for text in report.wrong),
        "refused_after_that": sum("this request is refused" in text for text in report.wrong),
        "wrong_or_failed": len(report.wrong),
        "first_wrong": report.wrong[:3],
        "seconds": round(time.perf_counter() - began_s, 1),
    }


async def cut(num_cuts: int, seed: int, down_s: float) -> dict[str, Any]:
    """Failures by cut connections."""
    began_s, total = time.perf_counter(), KillReport()
    async with real_server() as port:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600) as http:
            right = {name: await fetch(http, name) for name in REQUESTS}
        backends = [CuttingBackend(port, down_s=down_s) for _ in range(3)]
        async with gateway_over(*backends, policy="least-loaded", retry_share=1.0) as http:
            result: dict[str, Any] = {}
            for first in range(0, num_cuts, STEP):
                rng = random.Random(seed + first)
                count = min(STEP, num_cuts - first)
                report = await run_with_cuts(http, right, backends, count, NUM_CLIENTS, rng)
                total.num_answers += report.num_answers
                total.wrong += report.wrong
                page = (await http.get("/metrics")).text
                num_done = sum(backend.num_cuts for backend in backends)
                result = counted(page, total, num_done, began_s)
                print(json.dumps({"cuts": result}), flush=True)
    return result


async def kill(num_kills: int, seed: int, model: str, num_clients: int) -> dict[str, Any]:
    """Failures by SIGKILL."""
    began_s, report, rng = time.perf_counter(), KillReport(), random.Random(seed)
    settings = {
        "model": model,
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": 1024,
        "num_threads": 1,
    }
    replicas = [Replica(settings, served_model_name="demo") for _ in range(3)]
    for replica in replicas:
        replica.start()
    for replica in replicas:
        await asyncio.to_thread(replica.wait_ready, 600)
    gateway = GatewayProcess([replica.url for replica in replicas], policy="least-loaded")
    result: dict[str, Any] = {}
    try:
        await asyncio.to_thread(wait_until, gateway.is_ready, 600)
        async with httpx.AsyncClient(base_url=replicas[0].url, timeout=600) as http:
            right = {name: await fetch(http, name) for name in REQUESTS}
        is_over = asyncio.Event()
        async with httpx.AsyncClient(base_url=gateway.url, timeout=600) as http:
            clients = [
                asyncio.create_task(report.ask_until(http, right, number, is_over))
                for number in range(num_clients)
            ]
            for number in range(1, num_kills + 1):
                await kill_replicas(replicas, 1, rng)
                if number % 10 == 0 or number == num_kills:
                    page = (await http.get("/metrics")).text
                    result = counted(page, report, number, began_s)
                    print(json.dumps({"kills": result}), flush=True)
            is_over.set()
            await asyncio.gather(*clients)
            page = (await http.get("/metrics")).text
            result = counted(page, report, num_kills, began_s)
    finally:
        gateway.stop()
        for replica in replicas:
            replica.kill()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--down-s", type=float, default=0.0, help="of a backend after a cut")
    parser.add_argument("--model", default="demo", help="of the servers that are killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS, help="while servers are killed")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    record: dict[str, Any] = {"benchmark": "kills", "model": args.model, "clients": args.clients}
    if args.cuts:
        record["cuts"] = asyncio.run(cut(args.cuts, args.seed, args.down_s))
    if args.kills:
        record["kills"] = asyncio.run(kill(args.kills, args.seed, args.model, args.clients))
    print(json.dumps(record))
    if args.output is not None:
        args.output.write_text(json.dumps(record, indent=2) + "\n")
    failed = sum(record[kind]["wrong_or_failed"] for kind in ("cuts", "kills") if kind in record)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
