"""Speculation against plain decoding: the gain per drafter and workload, and that it never loses.

    python benchmarks/bench_speculation.py [--configs ngram draft] [--batches 1 8 32] [--tokens 64]
        [--repeats 5] [--workloads edit question free] [--model demo]

Two engines in one process, one that speculates and one that does not, answer the same prompts in
turn; the ratio of their speeds is taken turn by turn, and its median printed with the range.
Workloads: `edit` (source is to be repeated with a change: much of the answer is in the prompt),
`question` (a document, then a question on it), `free` (held-out text goes on, sampled at 0.8 with a
seed: little repeats). Each with greedy decoding but the last. Prompts are cut from the held-out
texts that ship with Ridgeline and differ from sequence to sequence. `none` compares plain decoding
with itself: what the noise is. Prints a table, and JSON lines with --json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from ridgeline import Engine, Sampling

CONFIGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "lookahead": {"method": "lookahead"},
    "auto": {"method": "auto", "model": "demo-draft"},
    "draft": {"method": "draft_model", "model": "demo-draft"},
}
HELDOUT = files("ridgeline") / "assets" / "heldout"


def texts(name: str, size: int, count: int) -> list[str]:
    """`count` different pieces of a held-out text."""
    whole = (HELDOUT / name).read_text(encoding="utf-8")
    step = max(1, (len(whole) - size) // max(1, count))
    return [whole[i * step : i * step + size] for i in range(count)]


def prompts_of(workload: str, count: int) -> list[str]:
    if workload == "edit":
        pieces = texts("code.txt", 500, count)
        return [f"{piece}\n\n# The same again:\n{piece[:160]}" for piece in pieces]
    if workload == "question":
        return [f"{piece}\n\nIn short: {piece[:40]}" for piece in texts("docs.txt", 700, count)]
    return texts("code.txt", 300, count)


def sampling_of(workload: str, tokens: int) -> Sampling:
    if workload == "free":
        return Sampling(temperature=0.8, seed=1, max_tokens=tokens, ignore_eos=True)
    return Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def seconds(engine: Engine, prompts: Sequence[str], sampling: Sampling) -> float:
    begun_s = time.perf_counter()
    engine.generate(prompts, sampling)
    return time.perf_counter() - begun_s


def gained(engine: Engine, before: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in engine.counters().items()}


def compare(
    plain: Engine, fast: Engine, prompts: Sequence[str], sampling: Sampling, repeats: int
) -> dict[str, Any]:
    """Median and range of the turn-by-turn ratio; what was drafted and accepted."""
    seconds(plain, prompts, sampling)
    seconds(fast, prompts, sampling)
    before = dict(fast.counters())
    ratios, plain_s = [], []
    for turn in range(repeats):
        first = seconds(fast, prompts, sampling) if turn % 2 else 0.0
        off_s = seconds(plain, prompts, sampling)
        on_s = first or seconds(fast, prompts, sampling)
        ratios.append(off_s / on_s)
        plain_s.append(off_s)
    counts = gained(fast, before)
    drafted = counts["spec_decode_num_draft_tokens"]
    tokens = counts["generation_tokens"]
    return {
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "plain_tok_s": tokens / repeats / statistics.median(plain_s),
        "drafted_per_token": drafted / tokens,
        "accepted": counts["spec_decode_num_accepted_tokens"] / drafted if drafted else 0.0,
        "tokens_per_step": tokens / counts["num_steps"] / len(prompts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--configs", nargs="+", default=list(CONFIGS))
    parser.add_argument("--workloads", nargs="+", default=["edit", "question", "free"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--depth", type=int, help="a fixed depth in place of the controller")
    args = parser.parse_args()
    print(f"{'config':8}{'workload':10}{'batch':>6}{'plain tok/s':>13}{'ratio':>8}  range")
    common = {"num_threads": args.threads, "seed": 1}
    with Engine.open(args.model, **common) as plain:
        for name in args.configs:
            config = CONFIGS[name]
            if config and args.depth:
                config = {**config, "num_speculative_tokens": args.depth}
            with Engine.open(args.model, speculative_config=config, **common) as fast:
                for workload in args.workloads:
                    for batch in args.batches:
                        run(args, plain, fast, name, workload, batch)


def run(
    args: argparse.Namespace, plain: Engine, fast: Engine, name: str, workload: str, batch: int
) -> None:
    prompts, sampling = prompts_of(workload, batch), sampling_of(workload, args.tokens)
    found = compare(plain, fast, prompts, sampling, args.repeats)
    print(
        f"{name:8}{workload:10}{batch:6}{found['plain_tok_s']:13.0f}{found['ratio']:8.2f}  "
        f"{found['low']:.2f}..{found['high']:.2f}  drafted {found['drafted_per_token']:.2f} per "
        f"token, {found['accepted']:.0%} accepted, {found['tokens_per_step']:.2f} tokens per step",
        flush=True,
    )
    if args.json:
        print(json.dumps({"config": name, "workload": workload, "batch": batch, **found}))


if __name__ == "__main__":
    main()
