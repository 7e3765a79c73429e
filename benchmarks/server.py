"""What HTTP adds to the engine: TTFT and throughput at 32 streams, and 500 streams at once.

    python benchmarks/server.py [--model dummy:smollm2-135m] [--quantization int8] [--rounds 5]
        [--streams 32] [--requests 128] [--alone 12] [--prompt-tokens 256] [--answer-tokens 128]
        [--open 500] [--think-ms 25] [--stream-interval 1] [--dtype auto] [--former DIR]
        [--streamed-only]

Every arm runs the same model with the same settings and prompts in a closed loop, and the arms
alternate: *inside* calls `Engine.stream` in this process; *http* streams `/v1/completions` from a
server process; *whole* requests the same responses without streaming; *former*, with `--former`, is
the server of another checkout. A request is that of a chat: 256 tokens in, 128 out. Per-request
cost weighs more the shorter the response: try `--prompt-tokens 32 --answer-tokens 48`. Responses
have half to one and a half times that length, so that requests arrive one by one after the first
wave; with `--burst` they are all alike and arrive in waves.

Between a response and the next request there is a pause, evenly spread over `--think-ms`. Without
one, the arm in this process submits at the instant at which a step has ended, and is in the next
step; a request over HTTP arrives later and waits for one step more, so that TTFT measures the
length of a step.

The client shares the cores with the server, as on a laptop. Its CPU time per token is printed, and
that of the server's event loop: HTTP costs about their sum over the cores. TTFT is from the call
(or the first byte sent) to the first token, over all requests but the first wave. Prints a row per
round, the medians over rounds of the pairwise differences, then one JSON line.
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

Load = Callable[[list[int], int], "LoadResult"]
"""Request numbers and number of streams → result."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """(TTFT in seconds, tokens) of every request in order; CPU seconds of the client."""

    requests: list[tuple[float, int]]
    elapsed_s: float
    cpu_s: float

    @property
    def num_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self.requests)

    def ttft_ms(self, num_skipped: int) -> float:
        return statistics.median(ttft_s for ttft_s, _ in self.requests[num_skipped:]) * 1000

    @property
    def tok_s(self) -> float:
        return self.num_tokens / self.elapsed_s


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and response length of each request: all alike (`burst`), or evenly spread."""

    num_prompt: int
    mean: int
    burst: bool = False
    think_s: float = 0.0

    def prompt(self, index: int) -> list[int]:
        """No two prompts begin alike: nothing is found in the prefix cache."""
        return [10 + (index * 7919 + place * 31) % 4000 for place in range(self.num_prompt)]

    def pause_s(self, index: int) -> float:
        """Pause before the next request."""
        return self.think_s * ((index * 0.6180339887498949) % 1.0)

    def of(self, index: int) -> int:
        """Output tokens."""
        shortest = self.mean // 2
        return self.mean if self.burst else shortest + (index * 29) % self._period

    def others(self, numbers: list[int]) -> list[int]:
        """Requests of the same lengths with other prompts, which are not in the server's cache.
        Prompts repeat every 4000 numbers, lengths every (odd) period."""
        return [number + 2000 * self._period for number in numbers]

    @property
    def _period(self) -> int:
        return 2 * (self.mean - self.mean // 2) + 1


@contextlib.contextmanager
def serving(flags: list[str], root: Path | None = None) -> Iterator[tuple[str, int]]:
    """`ridgeline` with these arguments, `serve` the first: its URL and process id.

    `root`: an installed checkout, whose own Python is used: with an editable install, this
    interpreter would find this checkout's modules in any folder.
    """
    python = Path(sys.executable) if root is None else root.absolute() / ".venv/bin/python"
    if not python.exists():
        raise SystemExit(f"{python} is missing: run `make install` in that checkout")
    code = f"import sys; sys.argv = ['ridgeline', *{flags}]; from ridgeline.cli.main import main"
    command = [str(python), "-c", code + "; main()"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=root)
    assert process.stderr is not None
    try:
        lines = iter(process.stderr.readline, "")
        ready = next((line for line in lines if "is served at" in line), None)
        if ready is None:
            raise SystemExit(f"the server did not start: {' '.join(flags)}")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield ready.split("is served at ")[1].split("/v1")[0].strip(), process.pid
    finally:
        process.terminate()
        process.wait(timeout=30)


def loop_cpu_s(process_id: int) -> float:
    """CPU seconds of a process's first thread: the server's event loop (Linux)."""
    text = Path(f"/proc/{process_id}/task/{process_id}/schedstat").read_text()
    return int(text.split()[0]) / 1e9


def inside(engine: Engine, lengths: Lengths) -> Load:
    """The load on `Engine.stream`."""

    async def run_one(index: int, due_s: float) -> tuple[float, int]:
        ttft_s, num_tokens = 0.0, 0
        sampling = Sampling(temperature=0.0, max_tokens=lengths.of(index), ignore_eos=True)
        async for event in engine.stream(lengths.prompt(index), sampling):
            if isinstance(event, Token):
                ttft_s = ttft_s or time.perf_counter() - due_s
                num_tokens += 1
        return ttft_s, num_tokens

    async def closed_loop(numbers: list[int], streams: int) -> LoadResult:
        left, done = iter(numbers), {}

        async def user() -> None:
            due_s = time.perf_counter()
            for index in left:
                await asyncio.sleep(due_s - time.perf_counter())
                done[index] = await run_one(index, due_s)
                due_s = time.perf_counter() + lengths.pause_s(index)

        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        await asyncio.gather(*(user() for _ in range(streams)))
        elapsed_s, cpu_s = time.perf_counter() - began_s, time.thread_time() - began_cpu_s
        return LoadResult([done[index] for index in numbers], elapsed_s, cpu_s)

    return lambda numbers, streams: asyncio.run(closed_loop(numbers, streams))


class Client:
    """The load client, a separate program (`stream_client.c`)."""

    def __init__(self, program: Path, url: str, lengths: Lengths) -> None:
        self._program, self._lengths = program, lengths
        self._host, self._port = urlsplit(url).netloc.split(":")

    def load(self, numbers: list[int], streams: int, stream: bool = True) -> LoadResult:
        head = f"{self._port} {streams} {len(numbers)}\n".encode()
        script = head + b"".join(self._request(number, stream) for number in numbers)
        done = subprocess.run([self._program], input=script, stdout=subprocess.PIPE, check=True)
        *rows, last = (line.split() for line in done.stdout.decode().splitlines())
        elapsed_s, cpu_s = (int(field) / 1e9 for field in last[1:])
        requests = [
            (int(ttft_ns) / 1e9, int(events) if stream else self._lengths.of(number))
            for number, (ttft_ns, events) in zip(numbers, rows, strict=True)
        ]
        return LoadResult(requests, elapsed_s, cpu_s)

    def _request(self, number: int, stream: bool) -> bytes:
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
def compiled_client() -> Iterator[Path]:
    """The compiled load client."""
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
    num_requests: int,
    rounds: int,
) -> dict[str, float]:
    """Rounds of all arms; medians of the differences to the first arm.

    `process_ids`: of the servers of arms that have one.
    """
    rows: list[dict[str, LoadResult]] = []
    loop_us: dict[str, list[float]] = {name: [] for name in arms}
    for round_ in range(rounds + 1):  # the first round warms up and is not counted
        results: dict[str, LoadResult] = {}
        numbers = list(range(round_ * num_requests, (round_ + 1) * num_requests))
        for name, load in list(arms.items())[:: 1 if round_ % 2 else -1]:
            process_id = process_ids.get(name)
            before_s = 0.0 if process_id is None else loop_cpu_s(process_id)
            results[name] = load(numbers, streams)
            after_s = 0.0 if process_id is None else loop_cpu_s(process_id)
            loop_us[name].append((after_s - before_s) / results[name].num_tokens * 1e6)
            expected = [lengths.of(index) for index in numbers]
            assert [tokens for _, tokens in results[name].requests] == expected, "tokens were lost"
        if round_:
            rows.append(results)
            print(
                f"{streams:3} streams, round {round_}: "
                + " · ".join(
                    f"{name} TTFT {result.ttft_ms(streams):.2f} ms, {result.tok_s:,.0f} tok/s"
                    for name, result in results.items()
                ),
                flush=True,
            )
    first, *others = arms
    figures: dict[str, float] = {}
    for name in others:
        tag = f"{name}_{streams}"
        figures[f"throughput_lost_{tag}"] = _median(
            1 - row[name].tok_s / row[first].tok_s for row in rows
        )
        figures[f"server_loop_us_per_token_{tag}"] = _median(loop_us[name][1:])
        figures[f"client_us_per_token_{tag}"] = _median(
            row[name].cpu_s / row[name].num_tokens * 1e6 for row in rows
        )
        if name != "whole":
            added = (row[name].ttft_ms(streams) - row[first].ttft_ms(streams) for row in rows)
            figures[f"ttft_added_ms_{tag}"] = _median(added)
    return figures


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def many_open(client: Client, lengths: Lengths, num_open: int) -> dict[str, float]:
    """All streams at once, each read to its end."""
    numbers = list(range(1_000_000, 1_000_000 + num_open))
    result = client.load(numbers, num_open)
    pairs = zip(result.requests, numbers, strict=True)
    num_complete = sum(tokens == lengths.of(number) for (_, tokens), number in pairs)
    print(f"{num_open} open streams: {num_complete} complete, {result.elapsed_s:.1f} s")
    return {
        "open_streams": num_open,
        "open_errors": num_open - num_complete,
        "open_s": result.elapsed_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="dummy:smollm2-135m")
    parser.add_argument("--quantization", default="int8", help="int8, int4 or none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--alone", type=int, default=12, help="requests of one stream; 0: skip")
    parser.add_argument("--open", type=int, default=500)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=128, help="mean")
    parser.add_argument("--burst", action="store_true")
    parser.add_argument("--think-ms", type=float, default=25.0)
    parser.add_argument("--stream-interval", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--former", type=Path, help="an installed checkout to compare with")
    parser.add_argument("--streamed-only", action="store_true", help="without the arm *whole*")
    args = parser.parse_args()
    lengths = Lengths(args.prompt_tokens, args.answer_tokens, args.burst, args.think_ms / 1000)
    settings = {"max_num_seqs": args.streams, "dtype": args.dtype}
    flags = ["serve", args.model, "--port", "0", "--max-num-seqs", str(args.streams)]
    flags += ["--stream-interval", str(args.stream_interval), "--dtype", args.dtype]
    if args.quantization != "none":
        settings["quantization"] = args.quantization
        flags += ["--quantization", args.quantization]
    figures: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        program = stack.enter_context(compiled_client())
        url, pid = stack.enter_context(serving(flags))
        engine = stack.enter_context(Engine.open(args.model, **settings))
        client = Client(program, url, lengths)
        arms: dict[str, Load] = {
            "inside": inside(engine, lengths),
            "http": client.load,
            "whole": lambda numbers, streams: client.load(
                lengths.others(numbers), streams, stream=False
            ),
        }
        pids = {"http": pid, "whole": pid}
        if args.streamed_only:
            del arms["whole"]
        if args.former:
            former_url, pids["former"] = stack.enter_context(serving(flags, args.former))
            arms["former"] = Client(program, former_url, lengths).load
        if args.rounds and args.alone:
            figures |= compare(arms, pids, lengths, 1, args.alone, args.rounds)
        if args.rounds:
            figures |= compare(arms, pids, lengths, args.streams, args.requests, args.rounds)
        if args.open:
            figures |= many_open(client, lengths, args.open)
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
