"""Time to first token of a returning conversation: recomputed, from memory, from files.

    python benchmarks/bench_kv_tiers.py [MODEL] [--tokens N] [--conversations N] [--rounds N]
        [--never N] [--output FILE]

The pool of the KV cache holds one conversation, so each has been evicted when it returns. The arms
take turns within a round. `files` drops the page cache of the files first (posix_fadvise), so that
they are read from the disk; `files (page cache)` does not. `without reuse` is the CPU time of the
first visits, saving included, relative to an engine without tiers. Medians over rounds; the tokens
of every arm are compared.

With --never, that many prompts that never return are sent instead, each to an engine without tiers
and to one per kind of tier in turn: CPU time of the prompt, writing included, relative to the
engine without, in blocks of eight prompts. Copies end after four times the pool.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from ridgeline.engine.engine import Engine
from ridgeline.records import Sampling, Token

GREEDY = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)


def conversation(seed: int, num_tokens: int, vocab_size: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, vocab_size) for _ in range(num_tokens)]


def send(engine: Engine, prompt: Sequence[int]) -> tuple[float, list[int]]:
    """(seconds to the first token, tokens)."""
    began_s, first_s, tokens = time.perf_counter(), 0.0, []
    for event in engine.iterate(prompt, GREEDY):
        if isinstance(event, Token):
            first_s = first_s or time.perf_counter() - began_s
            tokens.append(event.token)
    return first_s, tokens


def drop_page_cache(folder: Path) -> None:
    for path in folder.rglob("*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def open_engine(args: argparse.Namespace, **tiers: object) -> Engine:
    return Engine.open(
        args.model,
        max_model_len=args.tokens + 64,
        kv_cache_memory_bytes=args.pool_bytes,
        **tiers,  # type: ignore[arg-type]
    )


def pool_bytes(args: argparse.Namespace) -> int:
    """Memory of a pool for one conversation and a little."""
    with Engine.open(args.model, max_model_len=args.tokens + 64) as engine:
        info = engine.info
        return (args.tokens + 96) * info.kv_bytes_per_token


def measure(args: argparse.Namespace, seed: int, folder: Path | None, **tiers: object) -> dict:
    """TTFT of the first visit, of the second one, and what they answered."""
    with open_engine(args, **tiers) as engine:
        vocab_size = engine.info.vocab_size
        prompts = [
            conversation(seed + i, args.tokens, vocab_size) for i in range(args.conversations)
        ]
        began_s = time.process_time()
        first = [send(engine, prompt) for prompt in prompts]
        first_cpu_s = time.process_time() - began_s
        if folder is None:
            second = [send(engine, prompt) for prompt in prompts]
    if folder is not None:  # another process would find the same: only the files are left
        if args.drop:
            drop_page_cache(folder)
        with open_engine(args, **tiers) as engine:
            second = [send(engine, prompt) for prompt in prompts]
    return {
        "first_s": [ttft_s for ttft_s, _ in first],
        "first_cpu_s": first_cpu_s,
        "second_s": [ttft_s for ttft_s, _ in second],
        "tokens": [[*tokens] for _, tokens in first] + [[*tokens] for _, tokens in second],
    }


def run_round(args: argparse.Namespace, seed: int) -> dict[str, dict]:
    arms = {"recomputed": measure(args, seed, None)}
    arms["memory"] = measure(args, seed, None, kv_tier_memory=args.memory)
    for name, args.drop in (("files", True), ("files (page cache)", False)):
        with TemporaryDirectory(dir=args.folder) as folder:
            arms[name] = measure(
                args, seed, Path(folder), kv_tier_dir=folder, kv_tier_memory=args.memory
            )
    for arm in arms.values():
        assert arm["tokens"] == arms["recomputed"]["tokens"], "a tier changed an answer"
    return arms


def cost_without_reuse(args: argparse.Namespace) -> dict[str, list[float]]:
    """CPU time relative to that without tiers, by arm, for each eight prompts."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(dir=args.folder))
        kinds: dict[str, dict[str, object]] = {
            "none": {},
            "memory": {"kv_tier_memory": args.memory},
            "files": {"kv_tier_memory": args.memory, "kv_tier_dir": folder},
        }
        engines = {k: stack.enter_context(open_engine(args, **own)) for k, own in kinds.items()}
        vocab_size = engines["none"].info.vocab_size
        cpu_s: dict[str, list[float]] = {kind: [] for kind in kinds}
        order = list(kinds)
        for number in range(-1, args.never):
            prompt = conversation(number + 10**6, args.tokens, vocab_size)
            random.Random(number).shuffle(order)
            for kind in order:
                began_s = time.process_time()
                send(engines[kind], prompt)
                time.sleep(0.3)  # writes of files end
                if number >= 0:  # the first prompt warms up
                    cpu_s[kind].append(time.process_time() - began_s)
        parts = range(0, args.never, 8)
        return {
            kind: [sum(own[i : i + 8]) / sum(cpu_s["none"][i : i + 8]) for i in parts]
            for kind, own in cpu_s.items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--conversations", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=int, default=1 << 30)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--never", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    args.pool_bytes, args.drop = pool_bytes(args), False
    if args.never:
        costs = cost_without_reuse(args)
        for name, shares in costs.items():
            print(f"{name:<20}" + " ".join(f"{share:.3f}" for share in shares))
        if args.output is not None:
            facts = {"model": args.model, "tokens": args.tokens, "never": args.never}
            args.output.write_text(json.dumps({**facts, "without_reuse": costs}, indent=1) + "\n")
        return
    rounds = [run_round(args, 1000 * i) for i in range(args.rounds)]
    base_s = statistics.median(s for one in rounds for s in one["recomputed"]["second_s"])
    table = {}
    for name in rounds[0]:
        seconds = [s for one in rounds for s in one[name]["second_s"]]
        costs = [one[name]["first_cpu_s"] / one["recomputed"]["first_cpu_s"] for one in rounds]
        table[name] = {
            "ttft_ms": 1e3 * statistics.median(seconds),
            "times_faster": base_s / statistics.median(seconds),
            "time_without_reuse": statistics.median(costs),
        }
        print(
            f"{name:<20}{table[name]['ttft_ms']:>9.1f} ms{table[name]['times_faster']:>8.1f}x"
            f"   without reuse {table[name]['time_without_reuse']:.3f}"
        )
    if args.output is not None:
        facts = {"model": args.model, "tokens": args.tokens, "rounds": args.rounds}
        args.output.write_text(json.dumps({**facts, "arms": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
