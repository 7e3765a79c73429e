"""Abuse a server process with the demo model in every way a client can.

    python scripts/abuse_server.py [--cancels 10000] [--disconnects 200] [--model demo]

Disconnects in the middle of streams and of whole responses, requests that are cancelled as soon as
they are sent, more requests than the queue holds, more sequences than KV blocks, headers and bodies
that arrive byte by byte, bodies that are too large, NaN and infinities, responses that are not
read. After each: no sequence runs or waits, every KV block is free, /health is 200, and a greedy
response is unchanged. At the end: growth of memory and open files. The first flood of cancels shows
how much memory a backlog takes, the second that it does not leak.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import httpx
from serving import Served, serving

PATH = "/v1/completions"
FLAGS = ("--max-model-len", "512", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "4MiB")
TEXT = "import os\n"
MAX_BACKLOG_BYTES = 32 << 20  # of requests whose clients have disconnected
MAX_GROWTH_BYTES = 24 << 20


def raw(body: bytes, *, length: int | None = None) -> bytes:
    """A request as it is sent; `length`: its Content-Length, if it is to be wrong."""
    size = len(body) if length is None else length
    return (
        f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {size}\r\n\r\n".encode() + body
    )


async def send_and_disconnect(url: str, rng: random.Random, wait_s: float) -> None:
    """Send a request, wait and perhaps read a little, and disconnect, perhaps with a reset."""
    host, port = urlsplit(url).netloc.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    fields = {"prompt": TEXT, "max_tokens": 400, "ignore_eos": True, "n": rng.randint(1, 2)}
    writer.write(raw(json.dumps(fields | {"stream": rng.random() < 0.5}).encode()))
    await asyncio.sleep(rng.random() * wait_s)
    if wait_s and rng.random() < 0.3:
        await asyncio.wait({asyncio.create_task(reader.read(200))}, timeout=wait_s)
    if rng.random() < 0.5:
        reset = b"\x01\x00\x00\x00\x00\x00\x00\x00"
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    writer.close()


async def disconnect_many(server: Served, number: int, wait_s: float, at_once: int) -> str:
    gate, rng = asyncio.Semaphore(at_once), random.Random(number)

    async def one() -> None:
        async with gate:
            await send_and_disconnect(server.url, rng, wait_s)

    await asyncio.gather(*(one() for _ in range(number)))
    return f"{number} disconnects"


async def statuses_of(server: Served, bodies: list[dict[str, object]]) -> Counter[int]:
    limits = httpx.Limits(max_connections=2000)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as http:
        replies = await asyncio.gather(*(http.post(PATH, json=body) for body in bodies))
    for reply in replies:
        assert reply.status_code != 503 or int(reply.headers["retry-after"]) >= 1
    return Counter(reply.status_code for reply in replies)


async def overflow(server: Served) -> str:
    bodies: list[dict[str, object]] = [
        {"prompt": TEXT, "max_tokens": 20, "ignore_eos": True, "seed": index}
        for index in range(600)
    ]
    found = await statuses_of(server, bodies)
    assert set(found) <= {200, 503} and found[503], found
    return f"600 at once into a queue of 200: {dict(found)}"


async def exhaust(server: Served) -> str:
    before = server.counters()["num_preemptions"]
    body: dict[str, object] = {"prompt": TEXT, "max_tokens": 300, "ignore_eos": True}
    found = await statuses_of(server, [body | {"seed": at} for at in range(12)])
    assert set(found) == {200}, found
    preempted = server.counters()["num_preemptions"] - before
    return f"12 sequences of 300 tokens in few blocks: all answered, {preempted:.0f} preemptions"


async def drip(server: Served) -> str:
    """Headers or bodies byte by byte over many connections; other requests are served meanwhile."""
    host, port = urlsplit(server.url).netloc.split(":")

    async def one(text: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(host, int(port))
        reading = asyncio.ensure_future(reader.read(64))
        for byte in text:
            if reading.done() or writer.is_closing():
                break
            writer.write(bytes([byte]))
            await asyncio.wait({reading}, timeout=0.5)
        writer.close()
        return await reading

    head = raw(b"{", length=500)
    drips = [one(b"GET /health HTTP/1.1\r\nx: " + b"y" * 99) for _ in range(50)]
    drips += [one(head[:-1]) for _ in range(50)]
    dripping = asyncio.gather(*drips, return_exceptions=True)
    await asyncio.sleep(1)
    assert (await statuses_of(server, [{"prompt": TEXT, "max_tokens": 4}]))[200] == 1
    replies = await dripping
    assert all(isinstance(r, bytes) and b" 408 " in r for r in replies), set(map(str, replies))
    return "100 slow connections: all got 408, other requests were served"


async def send_head_only(server: Served, length: int) -> bytes:
    """The response to a request whose body is not sent."""
    host, port = urlsplit(server.url).netloc.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(raw(b"{", length=length))
    response = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return response


async def oversize(server: Served) -> str:
    big = await send_head_only(server, 5 << 20)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        whole = await http.post(PATH, content=b"x" * (20 << 20))
        deep = await http.post(PATH, content=b'{"prompt":' + b"[" * 100_000)
        long = await http.get("/health", headers={"x": "y" * 40_000})
        numbers = [
            await http.post(PATH, content=f'{{"prompt": "x", "{name}": {value}}}')
            for name in ("temperature", "top_p", "min_p", "timeout_ms", "presence_penalty")
            for value in ("NaN", "Infinity", "-Infinity", "1e999")
        ]
    assert b" 413 " in big.splitlines()[0], big
    assert (whole.status_code, deep.status_code, long.status_code) == (413, 400, 431)
    assert {reply.status_code for reply in numbers} == {400}, [r.text for r in numbers]
    return "413, 400 and 431 for size; 400 for 20 non-finite numbers"


async def unread(server: Served) -> str:
    """Streams and whole responses that are not read: they end, and free their blocks."""
    host, port = urlsplit(server.url).netloc.split(":")
    held = []
    for index in range(16):
        body = {"prompt": TEXT, "max_tokens": 200, "ignore_eos": True, "logprobs": 5}
        _, writer = await asyncio.open_connection(host, int(port), limit=1)
        writer.write(raw(json.dumps(body | {"stream": index % 2 == 0}).encode()))
        held.append(writer)
    await asyncio.to_thread(server.settle, 240.0)
    for writer in held:
        writer.close()
    return "16 unread responses"


def checked(server: Served, name: str, work: Callable[[], Awaitable[str]], expected: str) -> None:
    """Run it; afterwards nothing may be left of it."""
    began = time.monotonic()
    summary = asyncio.run(_run(work))
    server.settle(240.0)
    used = server.counters()["kv_cache_usage_perc"]
    healthy = httpx.get(f"{server.url}/health").status_code
    assert used == 0 and healthy == 200, (used, healthy)
    assert answer(server) == expected
    took_s, rss = time.monotonic() - began, server.rss_bytes() / 2**20
    print(f"{name}: {summary} · {took_s:.0f} s · RSS {rss:.0f} MiB · {server.num_files()} files")


async def _run(work: Callable[[], Awaitable[str]]) -> str:
    return await work()


def answer(server: Served) -> str:
    body = {"prompt": TEXT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{server.url}{PATH}", json=body, timeout=120)
    return str(reply.json()["choices"][0]["text"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cancels", type=int, default=10_000)
    parser.add_argument("--disconnects", type=int, default=200)
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    with serving(args.model, *FLAGS, "--max-num-queued-reqs", "200") as server:
        expected = answer(server)

        def abuse(name: str, work: Callable[[], Awaitable[str]]) -> None:
            checked(server, name, work, expected)

        abuse("overflow", lambda: overflow(server))
        abuse("exhaustion", lambda: exhaust(server))
        abuse("unread", lambda: unread(server))
        abuse("disconnects", lambda: disconnect_many(server, args.disconnects, 0.1, 20))
        before = server.rss_bytes()
        abuse("cancels", lambda: disconnect_many(server, args.cancels, 0.0, 40))
        rss, files = server.rss_bytes(), server.num_files()
        abuse("cancels again", lambda: disconnect_many(server, args.cancels, 0.0, 40))
        abuse("disconnects again", lambda: disconnect_many(server, args.disconnects, 0.1, 20))
        abuse("sizes", lambda: oversize(server))
        abuse("drips", lambda: drip(server))
        abuse("overflow again", lambda: overflow(server))
        grown, more = server.rss_bytes() - rss, server.num_files() - files
    mark = rss - before
    print(f"high water of the first flood: {mark / 2**20:.1f} MiB")
    print(f"grown by all that came after it: {grown / 2**20:.1f} MiB, {more} files")
    return 1 if mark > MAX_BACKLOG_BYTES or grown > MAX_GROWTH_BYTES or more > 5 else 0


if __name__ == "__main__":
    sys.exit(main())
