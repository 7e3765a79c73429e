"""CPU time of `ridgeline route` per token and per request, in front of a paced backend.

The backend is an ASGI app under uvicorn that writes events in Ridgeline's form, with comments, one
every 20 ms per stream. CPU seconds are those of the gateway's process; the clients, one httpx
stream each, run in this one. With `--event-ids`, clients ask for an id of every event.

    python benchmarks/gateway_cost.py [--event-ids]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import sys
import time
from typing import Any

import httpx
import psutil

NUM_STREAMS, NUM_TOKENS, PACE_S = 32, 300, 0.02
IDENTITY = json.dumps({"id": "cmpl-1", "created": 1, "seed": 1}).encode()
CHUNK = json.dumps(
    {
        "id": "cmpl-0123456789abcdef",
        "object": "text_completion",
        "created": 1,
        "model": "demo",
        "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}],
    }
).encode()


async def paced_app(scope: Any, receive: Any, send: Any) -> None:
    """`max_tokens` events, one every PACE_S."""
    if scope["type"] != "http":
        return
    if scope["method"] == "GET":
        body = b'{"data":[{"id":"demo"}]}'
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})
        return
    body = json.loads((await receive())["body"])
    headers = [(b"content-type", b"text/event-stream"), (b"x-ridgeline-resume", IDENTITY)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for i in range(body["max_tokens"]):
        if i:
            await asyncio.sleep(PACE_S)
        data = b"data: " + CHUNK + b"\n\n: 0:%d\n\n" % i
        await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n: end\n\n"})


def run_backend(port: int) -> None:
    import uvicorn

    uvicorn.run(paced_app, port=port, log_level="error", lifespan="off")


def run_gateway(port: int, backends: tuple[str, ...]) -> None:
    from ridgeline.config.server import RouteOptions
    from ridgeline.workflows.serving.route import route

    route(RouteOptions(port=port, backend=backends))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def stream(http: httpx.AsyncClient, max_tokens: int) -> int:
    body = {"model": "demo", "prompt": "x " * 400, "max_tokens": max_tokens, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        return sum([chunk.count(b"data: {") async for chunk in reply.aiter_raw()])


async def measure(url: str, gateway: psutil.Process, headers: dict[str, str]) -> None:
    limits = httpx.Limits(max_connections=100, max_keepalive_connections=100)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits, headers=headers) as http:
        await asyncio.gather(*[stream(http, 2) for _ in range(NUM_STREAMS)])
        before = sum(gateway.cpu_times()[:2])
        num_requests = 300
        for _ in range(num_requests // 10):
            await asyncio.gather(*[stream(http, 1) for _ in range(10)])
        request_s = (sum(gateway.cpu_times()[:2]) - before) / num_requests
        before = sum(gateway.cpu_times()[:2])
        counts = await asyncio.gather(*[stream(http, NUM_TOKENS) for _ in range(NUM_STREAMS)])
        used_s = sum(gateway.cpu_times()[:2]) - before - NUM_STREAMS * request_s
        assert sum(counts) == NUM_STREAMS * NUM_TOKENS, counts
    print(f"per request {request_s * 1e3:.2f} ms, per token {used_s / sum(counts) * 1e6:.1f} µs")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--event-ids", action="store_true")
    headers = {"x-ridgeline-event-ids": "1"} if parser.parse_args().event_ids else {}
    backend_port, gateway_port = free_port(), free_port()
    context = multiprocessing.get_context("spawn")
    backend = context.Process(target=run_backend, args=(backend_port,), daemon=True)
    urls = (f"http://127.0.0.1:{backend_port}",)
    gateway = context.Process(target=run_gateway, args=(gateway_port, urls), daemon=True)
    backend.start()
    gateway.start()
    url = f"http://127.0.0.1:{gateway_port}"
    for _ in range(600):
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                break
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    assert gateway.pid is not None
    for _ in range(3):
        asyncio.run(measure(url, psutil.Process(gateway.pid), headers))
    gateway.kill()
    backend.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
