"""What HTTP adds to the engine: TTFT and throughput at 32 streams, and 500 streams at once.

    python benchmarks/server.py [--rounds 5] [--streams 32] [--requests 128] [--alone 12]
        [--prompt-tokens 256] [--answer-tokens 128] [--open 500] [--think-ms 25]
        [--stream-interval 1] [--dtype auto] [--former DIR] [--streamed-only]

All arms run the demo model with the same settings and the same prompts, closed loop, in turns:
*inside* calls `Engine.stream` in this process; *http* streams `/v1/completions` from a server
process; *whole* asks the server for the same answers without streaming them, so that what is left
is the cost per token; *former*, with `--former`, is the server of another checkout. A request is a
chat's: 256 tokens in, 128 out, as in `bench_peers.py`. What HTTP costs per request weighs more the
shorter the answer: `--prompt-tokens 32 --answer-tokens 48` is such a load. Answers are half to one
and a half times as long as that, so that requests come one by one after the first wave, as people
do, in every arm; `--burst` makes them all alike (they then come in waves of `streams` at the same
instant, and TTFT is mostly the time to read so many requests).

Between an answer and the next request a user pauses, evenly spread over `--think-ms`. Without a
pause the arm in this process asks at the very instant at which a step has ended, and is in the next
step; over HTTP nobody can be, and waits for one step more: TTFT then tells how long a step is.

The client shares the cores with the server, as it would on a laptop. It is one thread that waits,
receives and counts; its CPU time per token is printed, and so is that of the server's event loop:
what HTTP takes is about their sum over the cores. TTFT is from the call (or the first byte sent) to
the first token, over all requests but the first wave. Prints a row per round, the medians over
rounds of the pairwise differences, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `ridgeline` sets it

from ridgeline.engine.engine import Engine
from ridgeline.records import Sampling, Token

Load = Callable[[list[int], int], "Measured"]
"""Request numbers and streams to what came of them."""


@dataclass(frozen=True, slots=True)
class Measured:
    """(TTFT in seconds, tokens) of every request in the order they began; client's CPU seconds."""

    done: list[tuple[float, int]]
    took_s: float
    cpu_s: float

    @property
    def num_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self.done)

    def ttft_ms(self, skipped: int) -> float:
        return statistics.median(ttft_s for ttft_s, _ in self.done[skipped:]) * 1000

    @property
    def tok_s(self) -> float:
        return self.num_tokens / self.took_s


@dataclass(frozen=True, slots=True)
class Lengths:
    """What each request brings, and how many tokens it wants: all alike (`burst`), or spread evenly
    about the same mean."""

    num_prompt: int
    mean: int
    burst: bool = False
    think_s: float = 0.0

    def prompt(self, index: int) -> list[int]:
        """No two begin alike, so that no prefix is found again."""
        return [10 + (index * 7919 + place * 31) % 4000 for place in range(self.num_prompt)]

    def pause_s(self, index: int) -> float:
        """How long the user waits before asking; nobody does for a first request."""
        return self.think_s * ((index * 0.6180339887498949) % 1.0)

    def of(self, index: int) -> int:
        fewest = self.mean // 2
        return self.mean if self.burst else fewest + (index * 29) % self._period

    def others(self, numbers: list[int]) -> list[int]:
        """Other prompts, of the same lengths: a server that has been asked the first would find
        them in its cache. Prompts repeat every 4000 numbers, lengths every (odd) period."""
        return [number + 2000 * self._period for number in numbers]

    @property
    def _period(self) -> int:
        return 2 * (self.mean - self.mean // 2) + 1


@contextlib.contextmanager
def server(
    max_num_seqs: int, stream_interval: int, dtype: str, root: Path | None = None
) -> Iterator[tuple[str, int]]:
    """A server process on a free port: its address and its process id. `root`: of another
    checkout's code."""
    flags = ["serve", "demo", "--port", "0", "--max-num-seqs", str(max_num_seqs)]
    flags += ["--stream-interval", str(stream_interval), "--dtype", dtype]
    with serving(flags, root) as found:
        yield found


@contextlib.contextmanager
def serving(flags: list[str], root: Path | None = None) -> Iterator[tuple[str, int]]:
    """`ridgeline` with these words, `serve` the first: its address and its process id. `root`: a
    checkout that is installed, whose own Python is taken: an editable install here would find this
    checkout's modules in any folder."""
    python = Path(sys.executable) if root is None else root.absolute() / ".venv/bin/python"
    if not python.exists():
        raise SystemExit(f"{python} is missing: run `make install` in that checkout")
    code = f"import sys; sys.argv = ['ridgeline', *{flags}]; from ridgeline.cli.main import main"
    command = [str(python), "-c", code + "; main()"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=root)
    assert process.stderr is not None
    try:
        lines = iter(process.stderr.readline, "")
        told = next((line for line in lines if "is served at" in line), None)
        if told is None:
            raise SystemExit(f"the server did not start: {' '.join(flags)}")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield told.split("is served at ")[1].split("/v1")[0].strip(), process.pid
    finally:
        process.terminate()
        process.wait(timeout=30)


def loop_cpu_s(process_id: int) -> float:
    """CPU seconds of a process's first thread: the server's event loop (Linux)."""
    text = Path(f"/proc/{process_id}/task/{process_id}/schedstat").read_text()
    return int(text.split()[0]) / 1e9


def inside(engine: Engine, lengths: Lengths) -> Load:
    async def ask(index: int, due_s: float) -> tuple[float, int]:
        ttft_s, num_tokens = 0.0, 0
        wanted = Sampling(temperature=0.0, max_tokens=lengths.of(index), ignore_eos=True)
        async for event in engine.stream(lengths.prompt(index), wanted):
            if isinstance(event, Token):
                ttft_s = ttft_s or time.perf_counter() - due_s
                num_tokens += 1
        return ttft_s, num_tokens

    async def closed_loop(numbers: list[int], streams: int) -> Measured:
        left, done = iter(numbers), {}

        async def user() -> None:
            due_s = time.perf_counter()
            for index in left:
                await asyncio.sleep(due_s - time.perf_counter())
                done[index] = await ask(index, due_s)
                due_s = time.perf_counter() + lengths.pause_s(index)

        began_s, cpu_s = time.perf_counter(), time.thread_time()
        await asyncio.gather(*(user() for _ in range(streams)))
        took_s, cpu_s = time.perf_counter() - began_s, time.thread_time() - cpu_s
        return Measured([done[index] for index in numbers], took_s, cpu_s)

    return lambda numbers, streams: asyncio.run(closed_loop(numbers, streams))


class Client:
    """The load client, a program of its own (`stream_client.c`): epoll, receive, count."""

    def __init__(self, program: Path, url: str, lengths: Lengths) -> None:
        self._program, self._lengths = program, lengths
        self._host, self._port = urlsplit(url).netloc.split(":")

    def load(self, numbers: list[int], streams: int, stream: bool = True) -> Measured:
        head = f"{self._port} {streams} {len(numbers)}\n".encode()
        asked = head + b"".join(self._told(number, stream) for number in numbers)
        done = subprocess.run([self._program], input=asked, stdout=subprocess.PIPE, check=True)
        *rows, last = (line.split() for line in done.stdout.decode().splitlines())
        took_s, cpu_s = (int(each) / 1e9 for each in last[1:])
        found = [
            (int(ttft_ns) / 1e9, int(events) if stream else self._lengths.of(number))
            for number, (ttft_ns, events) in zip(numbers, rows, strict=True)
        ]
        return Measured(found, took_s, cpu_s)

    def _told(self, number: int, stream: bool) -> bytes:
        fields = {
            "prompt": self._lengths.prompt(number),
            "max_tokens": self._lengths.of(number),
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        body = json.dumps(fields)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\n"
        request = (head + f"content-length: {len(body)}\r\n\r\n" + body).encode()
        pause_ns = round(self._lengths.pause_s(number) * 1e9)
        return f"{pause_ns} {len(request)}\n".encode() + request


@contextlib.contextmanager
def compiled() -> Iterator[Path]:
    """The load client, built for as long as it is needed."""
    source = Path(__file__).with_name("stream_client.c")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "stream_client"
        subprocess.run([os.environ.get("CC", "cc"), "-O2", "-o", program, source], check=True)
        yield program


def compare(
    arms: dict[str, Load],
    process_ids: dict[str, int],
    lengths: Lengths,
    streams: int,
    num: int,
    rounds: int,
) -> dict[str, float]:
    """Rounds of all arms in turns; medians of what each loses against the first. `process_ids`: of
    the server of each arm that has one."""
    rows: list[dict[str, Measured]] = []
    cpu: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):  # the first round warms up and is not counted
        found: dict[str, Measured] = {}
        numbers = list(range(number * num, (number + 1) * num))
        for name, load in list(arms.items())[:: 1 if number % 2 else -1]:
            process_id = process_ids.get(name)
            before_s = 0.0 if process_id is None else loop_cpu_s(process_id)
            found[name] = load(numbers, streams)
            after_s = 0.0 if process_id is None else loop_cpu_s(process_id)
            cpu[name].append((after_s - before_s) / found[name].num_tokens * 1e6)
            wanted = [lengths.of(index) for index in numbers]
            assert [tokens for _, tokens in found[name].done] == wanted, "tokens were lost"
        if number:
            rows.append(found)
            print(
                f"{streams:3} streams, round {number}: "
                + " · ".join(
                    f"{name} TTFT {each.ttft_ms(streams):.2f} ms, {each.tok_s:,.0f} tok/s"
                    for name, each in found.items()
                ),
                flush=True,
            )
    first, *others = arms
    told: dict[str, float] = {}
    for name in others:
        tag = f"{name}_{streams}"
        told[f"throughput_lost_{tag}"] = _median(
            1 - row[name].tok_s / row[first].tok_s for row in rows
        )
        told[f"server_loop_us_per_token_{tag}"] = _median(cpu[name][1:])
        told[f"client_us_per_token_{tag}"] = _median(
            row[name].cpu_s / row[name].num_tokens * 1e6 for row in rows
        )
    for name in [name for name in others if name != "whole"]:
        added = (row[name].ttft_ms(streams) - row[first].ttft_ms(streams) for row in rows)
        told[f"ttft_added_ms_{name}_{streams}"] = _median(added)
    return told


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def many_open(client: Client, lengths: Lengths, num_open: int) -> dict[str, float]:
    """All of them at once, each read to its end."""
    numbers = list(range(1_000_000, 1_000_000 + num_open))
    found = client.load(numbers, num_open)
    each = zip(found.done, numbers, strict=True)
    whole = sum(tokens == lengths.of(number) for (_, tokens), number in each)
    print(f"{num_open} open streams: {whole} whole, {found.took_s:.1f} s")
    return {"open_streams": num_open, "open_errors": num_open - whole, "open_s": found.took_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--alone", type=int, default=12, help="requests of one stream; 0: skip")
    parser.add_argument("--open", type=int, default=500)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=128, help="their mean")
    parser.add_argument("--burst", action="store_true")
    parser.add_argument("--think-ms", type=float, default=25.0)
    parser.add_argument("--stream-interval", type=int, default=1)
    parser.add_argument(
        "--dtype", default="auto", help="of both arms: float32 is the native layers"
    )
    parser.add_argument("--former", type=Path, help="a checkout whose server is an arm of its own")
    parser.add_argument("--streamed-only", action="store_true", help="without the arm *whole*")
    given = parser.parse_args()
    told = given.prompt_tokens, given.answer_tokens, given.burst, given.think_ms / 1000
    lengths, found = Lengths(*told), dict[str, float]()
    terms = given.streams, given.stream_interval, given.dtype
    with contextlib.ExitStack() as held:
        program = held.enter_context(compiled())
        url, pid = held.enter_context(server(*terms))
        engine = Engine.open("demo", max_num_seqs=given.streams, dtype=given.dtype)
        held.enter_context(engine)
        client = Client(program, url, lengths)
        arms: dict[str, Load] = {
            "inside": inside(engine, lengths),
            "http": client.load,
            "whole": lambda numbers, streams: client.load(
                lengths.others(numbers), streams, stream=False
            ),
        }
        pids = {"http": pid, "whole": pid}
        if given.streamed_only:
            del arms["whole"]
        if given.former:
            its_url, pids["former"] = held.enter_context(server(*terms, given.former))
            arms["former"] = Client(program, its_url, lengths).load
        if given.rounds and given.alone:
            found |= compare(arms, pids, lengths, 1, given.alone, given.rounds)
        if given.rounds:
            found |= compare(arms, pids, lengths, given.streams, given.requests, given.rounds)
        if given.open:
            found |= many_open(client, lengths, given.open)
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))


if __name__ == "__main__":
    main()
