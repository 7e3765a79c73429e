"""What switches of the scheduler and of the caches gain and cost on a real model.

    python benchmarks/bench_switches.py [--model smollm2] [--rounds 3] [--prompts 32]
        [--only engine answers pins routing schema] [--result OUT.json]

Each case is measured against the same load with the defaults; cases and rounds take turns, and the
first round, which warms up, is not counted (with `--rounds 0` it is the only one). Engine cases
run `ridgeline.bench` in this process; `answers`, `pins` and `schema` ask a server over HTTP,
`routing` two servers behind a gateway.
Prints, for each case, the medians of its figures and of the ratios to the defaults, with the range
of the latter. Counts (steps, tokens per step, preemptions, shares of tokens) and CPU time hold on a
busy machine as well; latencies and tokens per second do not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
from server import serving

import ridgeline
from ridgeline.hub.download import ensure_downloaded

Figures = dict[str, float]
CHAT = {"workload": "chat", "num_prompts": 32, "max_concurrency": 8}
LONG = {"workload": "synthetic:input=700,output=48", "num_prompts": 16, "max_concurrency": 4}
SMALL_POOL = 48 << 20  # bytes: about 1,100 tokens of SmolLM2 in 32 bits, for 8 chats at once
KEEPER = "You answer customers of a bookshop, briefly and in plain words. " * 40  # 480 tokens


class Case(msgspec.Struct, frozen=True):
    """A setting and the load that it is measured with. `base`: the case to compare with."""

    name: str
    base: str
    load: dict[str, Any]
    settings: dict[str, Any] = {}


CASES = (
    Case("chats", "chats", CHAT),
    Case("chats, --batching static", "chats", CHAT, {"batching": "static"}),
    Case("chats, --batching dynamic (20 ms)", "chats", CHAT, {"batch_wait_ms": 20.0}),
    Case("chats, --max-num-seqs 1", "chats", CHAT, {"max_num_seqs": 1}),
    Case("chats, KV cache of 48 MiB", "chats", CHAT, {"kv_cache_memory_bytes": SMALL_POOL}),
    Case("chats, --num-threads-decode 1", "chats", CHAT, {"num_threads_decode": 1}),
    Case("long prompts", "long prompts", LONG),
    Case(
        "long prompts, --no-enable-chunked-prefill",
        "long prompts",
        LONG,
        {"enable_chunked_prefill": False},
    ),
)


def bench(model: str, case: Case, seed: int, prompts: int) -> Figures:
    """One run: tokens/s, latencies in milliseconds, and counts of steps and tokens."""
    settings = dict(case.settings)
    if "batch_wait_ms" in settings:
        settings["batching"] = "dynamic"
    load = case.load | {"num_prompts": case.load["num_prompts"] * prompts // 32}
    made = ridgeline.bench(model, seed=seed, max_model_len=1024, **load, **settings)
    found, steps = made.summary, [step for step in made.run.steps if step.shapes]
    held = sum(new + old for step in steps for new, old in step.shapes)
    assert made.run.info
    slots = sum(step.used_blocks for step in steps) * made.run.info.block_size
    assert found.num_ok == found.num_requests
    assert found.ttft and found.tpot and found.itl and found.occupancy
    return {
        "tok/s": found.output_tok_s,
        "TTFT p95 (ms)": found.ttft.p(95) * 1000,
        "TPOT p95 (ms)": found.tpot.p(95) * 1000,
        "ITL p99 (ms)": found.itl.p(99) * 1000,
        "steps": found.occupancy.num_steps,
        "sequences per step": found.occupancy.mean_runs,
        "tokens per step": found.occupancy.mean_tokens,
        "preemptions": found.occupancy.num_preemptions,
        "tokens in vain": found.occupancy.wasted_steps,
        "KV slots per token held": slots / held,
        "fullest KV cache": found.occupancy.kv_occupancy_max,
    }


@contextlib.contextmanager
def client(model: str, *flags: str) -> Iterator[Callable[..., float]]:
    """Seconds that a chat with a server with these flags takes, as a function of its fields."""
    words = ["serve", model, "--port", "0", "--max-model-len", "1024", *flags]
    with serving(words) as (url, _), httpx.Client(base_url=url, timeout=300) as http:

        def ask(path: str = "/v1/chat/completions", **fields: Any) -> float:
            began_s = time.perf_counter()
            http.post(path, json=fields).raise_for_status()
            return time.perf_counter() - began_s

        yield ask


def chat(system: str, question: str, max_tokens: int) -> dict[str, Any]:
    roles = {"system": system, "user": question}
    messages = [{"role": role, "content": text} for role, text in roles.items() if text]
    return {"messages": messages, "max_tokens": max_tokens, "temperature": 0}


def measure_answers(model: str, rounds: int, prompts: int) -> dict[str, Figures]:
    """A request that comes again, computed and from the response cache."""
    first: list[float] = []
    again: list[float] = []
    with client(model, "--response-cache-size", "16MiB") as ask:
        for turn in range(rounds + 1):
            fields = chat("", f"Name {turn + 3} fruits.", 64)
            first.append(ask(**fields))
            again.append(ask(**fields))
    return _in_ms("response cache: the request", first, "the same again", again)


def measure_pins(model: str, rounds: int, prompts: int) -> dict[str, Figures]:
    """The first token behind a system prompt, after other texts have filled the cache."""
    flags = ("--kv-cache-memory-bytes", str(96 << 20), "--prefix-pin-share", "0.5")
    times: dict[bool, list[float]] = {False: [], True: []}
    with client(model, *flags) as ask:
        for turn in range(rounds + 1):
            for pinned in (False, True):
                system = f"Shop {turn} of {'us' if pinned else 'them'}. {KEEPER}"
                fields = chat(system, "Hello!", 1)
                if pinned:
                    ask("/v1/cache/warm", messages=fields["messages"][:1], ttl="5m")
                ask(**fields)
                for other in range(8):  # more tokens than the cache holds
                    ask(**chat("", f"{turn} {pinned} {other}: " + "seven grey cats " * 180, 1))
                times[pinned].append(ask(**fields))
                if pinned:
                    ask("/v1/cache/forget", messages=fields["messages"][:1])
    return _in_ms("system prompt, evicted by others", times[False], "pinned", times[True])


def _in_ms(name: str, own: list[float], other: str, others: list[float]) -> dict[str, Figures]:
    ratios = sorted(b / a for a, b in zip(own[1:], others[1:], strict=True))
    first, second = (statistics.median(each[1:]) * 1000 for each in (own, others))
    row = {"first (ms)": first, "second (ms)": second, "ratio": statistics.median(ratios)}
    return {f"{name}; {other}": row | {"least ratio": ratios[0], "largest ratio": ratios[-1]}}


@contextlib.contextmanager
def gateway(urls: list[str], policy: str) -> Iterator[str]:
    """The URL of `ridgeline route` in front of servers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["route", "--policy", policy, "--port", str(port)]
    words += [word for url in urls for word in ("--backend", url)]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([sys.executable, "-m", "ridgeline", *words])
    try:
        for _ in range(600):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/v1/models", timeout=5).status_code == 200:
                    break
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


def measure_routing(model: str, rounds: int, prompts: int) -> dict[str, Figures]:
    """Prompt tokens that two servers compute for the questions of six shops, one prompt each."""
    rows = {}
    for policy in ("least-loaded", "prefix-aware"):
        words = ["serve", model, "--port", "0", "--max-model-len", "1024", "--num-threads", "1"]
        with contextlib.ExitStack() as stack:
            urls = [stack.enter_context(serving(words))[0] for _ in range(2)]
            url = stack.enter_context(gateway(urls, policy))

            def ask(number: int, url: str = url) -> tuple[int, int]:
                system = f"Shop {number % 6}. {KEEPER}"
                fields = chat(system, f"What is book {number}?", 8)
                found = httpx.post(f"{url}/v1/chat/completions", json=fields, timeout=300)
                usage = found.raise_for_status().json()["usage"]
                return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

            with ThreadPoolExecutor(4) as pool:
                used = list(pool.map(ask, range(prompts)))
        all_tokens, cached = map(sum, zip(*used, strict=True))
        rows[f"two servers, --policy {policy}"] = {
            "requests": len(used),
            "prompt tokens": all_tokens,
            "computed": all_tokens - cached,
        }
    return rows


BOOK = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "year": {"type": "integer"},
        "genre": {"enum": ["novel", "poetry", "history"]},
    },
    "required": ["title", "year", "genre"],
    "additionalProperties": False,
}


def measure_schema(model: str, rounds: int, prompts: int) -> dict[str, Figures]:
    """Answers to the same wish for JSON, with a schema and without: valid ones, and CPU time."""
    format = {"type": "json_schema", "json_schema": {"name": "book", "schema": BOOK}}
    wish = "Describe a book as one JSON object with title, year and genre (novel, poetry, history)"
    rows = {}
    words = ["serve", model, "--port", "0", "--max-model-len", "1024", "--num-threads", "1"]
    with serving(words) as (url, pid), httpx.Client(base_url=url, timeout=300) as http:
        for name, extra in (("free", {}), ("with a schema", {"response_format": format})):
            used: Figures = defaultdict(float)
            for number in range(-1, prompts):  # the first one warms up
                fields = chat("", f"{wish} that begins with {chr(66 + number % 24)}.", 120) | extra
                before_s = sum(psutil.Process(pid).cpu_times()[:2])
                answer = http.post("/v1/chat/completions", json=fields).raise_for_status().json()
                if number >= 0:
                    used["CPU s"] += sum(psutil.Process(pid).cpu_times()[:2]) - before_s
                    used["tokens"] += answer["usage"]["completion_tokens"]
                    used["valid"] += is_book(answer["choices"][0]["message"]["content"])
            used["CPU ms per token"] = used["CPU s"] / used["tokens"] * 1000
            rows[f"answers in JSON, {name}"] = {"answers": prompts, **used}
    return rows


def is_book(text: str) -> bool:
    """Whether the text is what `BOOK` describes."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(found, dict)
        and found.keys() == BOOK["properties"].keys()
        and isinstance(found["title"], str)
        and len(found["title"]) <= 40
        and type(found["year"]) is int
        and found["genre"] in ("novel", "poetry", "history")
    )


def measure_engine(model: str, rounds: int, prompts: int) -> dict[str, Figures]:
    """Figures of every engine case, and their ratios to those of its base."""
    runs: dict[str, list[Figures]] = defaultdict(list)
    for turn in range(rounds + 1):
        for case in CASES[:: 1 if turn % 2 else -1]:
            runs[case.name].append(bench(model, case, turn, prompts))
    rows = {}
    for case in CASES:
        own, base = (runs[name][min(rounds, 1) :] for name in (case.name, case.base))
        row = {key: statistics.median(run[key] for run in own) for key in own[0]}
        for key in ("tok/s", "TTFT p95 (ms)", "TPOT p95 (ms)", "ITL p99 (ms)"):
            ratios = sorted(a[key] / b[key] for a, b in zip(own, base, strict=True))
            row |= {f"{key}, ratio": statistics.median(ratios)}
            row |= {f"{key}, least": ratios[0], f"{key}, largest": ratios[-1]}
        rows[case.name] = row
    return rows


PARTS = {
    "engine": measure_engine,
    "answers": measure_answers,
    "pins": measure_pins,
    "routing": measure_routing,
    "schema": measure_schema,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32, help="requests of a run")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    ensure_downloaded(args.model)
    rows: dict[str, Figures] = {}
    for part in args.only:
        rows |= PARTS[part](args.model, args.rounds, args.prompts)
    for name, row in rows.items():
        print(name, *(f"{key} {value:.4g}" for key, value in row.items()), sep=" | ", flush=True)
    if args.result:
        command = f"python benchmarks/{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}"
        machine = f"load average {os.getloadavg()[0]:.1f} at the end"
        date = time.strftime("%Y-%m-%d")
        document = {"machine": machine, "date": date, "command": command, "rows": rows}
        args.result.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
