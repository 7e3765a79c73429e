"""What HTTP adds to the engine: TTFT and throughput at 32 streams, and 500 streams at once.

    python benchmarks/server.py [--rounds 5] [--streams 32] [--requests 96] [--open 500]

Both arms run the demo model with the same settings and the same prompts, closed loop, in turns:
*inside* calls `Engine.stream` in this process; *http* streams `/v1/completions` from a server
process, read by a client that does little more than look for the ends of events. The client shares
the cores with the server, as it would on a laptop; its cost is counted as the server's. TTFT is
from the call (or the first byte sent) to the first token. Prints a row per round, the medians over
rounds of the pairwise differences, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from urllib.parse import urlsplit

from ridgeline.engine.engine import Engine
from ridgeline.records import Sampling, Token

NUM_PROMPT, MAX_TOKENS = 32, 48
Ask = Callable[[int], Awaitable[tuple[float, int]]]
"""One request by its number: (TTFT in seconds, tokens)."""


def prompt_of(index: int) -> list[int]:
    """No two begin alike, so that no prefix is found again."""
    return [10 + (index * 7919 + place * 31) % 4000 for place in range(NUM_PROMPT)]


@contextlib.contextmanager
def server(max_num_seqs: int) -> Iterator[str]:
    """A server process on a free port; its address."""
    flags = ["serve", "demo", "--port", "0", "--max-num-seqs", str(max_num_seqs)]
    code = f"import sys; sys.argv = ['ridgeline', *{flags}]; from ridgeline.cli.main import main"
    code += "; main()"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    url = ""
    for line in process.stderr:
        if "is served at" in line:
            url = line.split("is served at ")[1].split("/v1")[0].strip()
            break
    try:
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


def inside(engine: Engine) -> Ask:
    sampling = Sampling(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)

    async def ask(index: int) -> tuple[float, int]:
        began_s, ttft_s, num_tokens = time.perf_counter(), 0.0, 0
        async for event in engine.stream(prompt_of(index), sampling):
            if isinstance(event, Token):
                ttft_s = ttft_s or time.perf_counter() - began_s
                num_tokens += 1
        return ttft_s, num_tokens

    return ask


def over_http(url: str) -> tuple[Ask, Callable[[], None]]:
    """Requests over kept connections, and how to close them."""
    host, port = urlsplit(url).netloc.split(":")
    free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(index: int) -> tuple[float, int]:
        reader, writer = free.pop() if free else await asyncio.open_connection(host, int(port))
        body = json.dumps(
            {
                "prompt": prompt_of(index),
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        )
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        began_s, ttft_s, num_events, rest = time.perf_counter(), 0.0, 0, b""
        writer.write((head + body).encode())
        while b"[DONE]\n\n" not in rest:
            rest = rest[-16:] + (part := await reader.read(65536))
            if not part:
                raise ConnectionError("the server hung up")
            events = part.count(b"data: {")
            if events and not num_events:
                ttft_s = time.perf_counter() - began_s
            num_events += events
        while not rest.endswith(b"0\r\n\r\n"):
            rest += await reader.read(65536)
        free.append((reader, writer))
        return ttft_s, num_events

    def close() -> None:
        for _, writer in free:
            writer.close()
        free.clear()

    return ask, close


async def load(ask: Ask, num_requests: int, streams: int, first: int) -> tuple[float, float]:
    """(median TTFT in ms, tokens/s) of a closed loop of `streams`."""
    numbers = iter(range(first, first + num_requests))
    done: list[tuple[float, int]] = []

    async def user() -> None:
        for index in numbers:
            done.append(await ask(index))

    began_s = time.perf_counter()
    await asyncio.gather(*(user() for _ in range(streams)))
    took_s = time.perf_counter() - began_s
    assert all(num_tokens == MAX_TOKENS for _, num_tokens in done), "tokens were lost"
    ttft_ms = statistics.median(ttft_s for ttft_s, _ in done) * 1000
    return ttft_ms, sum(num_tokens for _, num_tokens in done) / took_s


async def compare(
    engine: Engine, url: str, streams: int, num_requests: int, rounds: int
) -> dict[str, float]:
    http, close = over_http(url)
    arms: list[tuple[str, Ask]] = [("inside", inside(engine)), ("http", http)]
    rows: list[dict[str, tuple[float, float]]] = []
    for number in range(rounds + 1):  # the first round warms up and is not counted
        found = {}
        for name, ask in arms if number % 2 else arms[::-1]:
            found[name] = await load(ask, num_requests, streams, first=number * num_requests)
            close()  # the server would, before the next round
        if number:
            rows.append(found)
            print(
                f"{streams:3} streams, round {number}: "
                + " · ".join(f"{n} TTFT {t:.2f} ms, {r:,.0f} tok/s" for n, (t, r) in found.items())
            )
    ttft = statistics.median(row["http"][0] - row["inside"][0] for row in rows)
    share = statistics.median(1 - row["http"][1] / row["inside"][1] for row in rows)
    return {f"ttft_added_ms_{streams}": ttft, f"throughput_lost_{streams}": share}


async def many_open(url: str, num_open: int) -> dict[str, float]:
    """All of them at once, each read to its end."""
    http, close = over_http(url)
    began_s = time.perf_counter()
    done = await asyncio.gather(
        *(http(1_000_000 + index) for index in range(num_open)), return_exceptions=True
    )
    close()
    errors = [each for each in done if isinstance(each, BaseException)]
    for error in errors[:3]:
        print(f"error: {error!r}")
    whole = sum(not isinstance(each, BaseException) and each[1] == MAX_TOKENS for each in done)
    took_s = time.perf_counter() - began_s
    print(f"{num_open} open streams: {whole} whole, {len(errors)} errors, {took_s:.1f} s")
    return {"open_streams": num_open, "open_errors": num_open - whole, "open_s": took_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--open", type=int, default=500)
    given = parser.parse_args()
    with server(given.streams) as url, Engine.open("demo", max_num_seqs=given.streams) as engine:
        found: dict[str, float] = {}
        if given.rounds:
            found |= asyncio.run(compare(engine, url, 1, 24, given.rounds))
            each = asyncio.run(compare(engine, url, given.streams, given.requests, given.rounds))
            found |= each
        if given.open:
            found |= asyncio.run(many_open(url, given.open))
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))


if __name__ == "__main__":
    main()
