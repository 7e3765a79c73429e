"""How many streamed requests per second the load client sustains on one core, and what else could.

    python benchmarks/load_client.py            # our client against the null server
    python benchmarks/load_client.py --httpx    # httpx on the same load, interleaved

The null server (`MockServer` at zero pace) has one core, the client another. Each request
streams `TOKENS` chunks. Prints requests/s of every round and the medians, then one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
from typing import Any

from ridgeline.measure.client.http_target import HttpTarget
from ridgeline.measure.client.load_client import LoadOptions, run_load
from ridgeline.measure.mock.pace import MockPace
from ridgeline.measure.mock.server import MockServer
from ridgeline.measure.workload import LoadRequest
from ridgeline.measure.workload.arrivals import Closed, Renewal

TOKENS, ROUNDS, REQUESTS, USERS = 8, 5, 6000, 32


class Load:
    name = "null"

    def sample(self, n: int, seed: int) -> Any:
        for i in range(n):
            yield LoadRequest(id=str(i), kind="null", prompt="hello there", max_tokens=TOKENS)


def serve(ports: Any, core: int | None) -> None:
    async def main() -> None:
        server = await MockServer(MockPace(ttft_s=0, itl_s=0)).listen("127.0.0.1", 0)
        ports.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    pin(core)
    asyncio.run(main())


def pin(core: int | None) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})


async def ours(port: int) -> tuple[float, float]:
    target = HttpTarget(f"http://127.0.0.1:{port}", "steady")
    run = await run_load(target, Load(), Closed(USERS), LoadOptions(num_requests=REQUESTS))
    await target.close()
    assert all(request.error is None for request in run.requests)
    return REQUESTS / run.duration_s, run.client_cpu_share or 0.0


async def open_loop(port: int, rate: float) -> tuple[float, float]:
    """(p99 of the send lag in ms, CPU share) at an offered rate."""
    target = HttpTarget(f"http://127.0.0.1:{port}", "steady")
    options = LoadOptions(num_requests=int(3 * rate))
    run = await run_load(target, Load(), Renewal(rate), options)
    await target.close()
    return 1000 * (run.send_lag_p99_s or 0.0), run.client_cpu_share or 0.0


async def with_httpx(port: int) -> float:
    import httpx

    body = {"model": "steady", "prompt": "hello there", "max_tokens": TOKENS, "stream": True}
    count = REQUESTS // 4
    left = iter(range(count))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, trust_env=False) as client:

        async def user() -> None:
            for _ in left:
                url = f"http://127.0.0.1:{port}/v1/completions"
                async with client.stream("POST", url, json=body) as response:
                    async for _line in response.aiter_bytes():
                        pass

        began = time.perf_counter()
        await asyncio.gather(*(user() for _ in range(USERS)))
        return count / (time.perf_counter() - began)


def main() -> None:
    cores = sorted(os.sched_getaffinity(0))
    mine, other = (cores[-1], cores[0]) if len(cores) > 1 else (None, None)
    here, there = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(there, other), daemon=True)
    server.start()
    pin(mine)
    port = here.recv()
    asyncio.run(ours(port))
    rates, peers = [], []
    for _ in range(ROUNDS):
        rate, cpu = asyncio.run(ours(port))
        rates.append(rate)
        print(f"ours   {rate:8.0f} requests/s  {rate * TOKENS:8.0f} tokens/s  cpu {cpu:.0%}")
        if "--httpx" in sys.argv:
            peers.append(asyncio.run(with_httpx(port)))
            print(f"httpx  {peers[-1]:8.0f} requests/s")
    lag_ms, cpu = asyncio.run(open_loop(port, 2000))
    print(f"open loop at 2000/s: send lag p99 {lag_ms:.2f} ms, cpu {cpu:.0%}")
    found = {"requests_s": statistics.median(rates), "tokens_per_request": TOKENS}
    found |= {"lag_p99_ms_at_2000": lag_ms, "cpu_at_2000": cpu}
    if peers:
        found["httpx_requests_s"] = statistics.median(peers)
    print(json.dumps(found))
    server.terminate()


if __name__ == "__main__":
    main()
