"""Which KV caches pass the gate that `optimize` and `eval` judge them by, on real weights.

    python benchmarks/bench_recall_gate.py [--model smollm2] [--context 640] [--looks 3]
        [--caches int8 int4 snapkv:0.75 …] [--result OUT.json]

A cache is a format of --kv-cache-dtype, or METHOD:BUDGET of --kv-eviction-config. Each is compared
with a float32 cache that keeps everything: facts asked for in contexts of up to `--context` tokens,
and, where keys are evicted, greedy continuations of texts of that length. `--looks` bounds how much
is read: 16 contexts, then 32, then 64. The table says what each check measured, and its verdict.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.engine.engine import Engine
from ridgeline.optimize.quality import (
    QualityVerdict,
    RecallPart,
    RecallReference,
    SequentialPanel,
    load_quality_limits,
)
from ridgeline.optimize.quality.served_text import ServedReference, ServedTextPart
from ridgeline.workflows.evaluate.long_contexts import (
    EngineContexts,
    context_tokens,
    recall_texts,
    texts_to_continue,
)

CACHES = ["bfloat16", "int8", "fp8", "int4", "snapkv:0.75", "adakv:0.75", "streaming:0.75",
          "h2o:0.75", "snapkv:0.9"]  # fmt: skip
COLUMNS = ["cache", "verdict", "contexts", "needle", "second turn", "later", "KL (nats)",
           "equal tokens", "s"]  # fmt: skip
TASKS = ("needle", "second turn", "later")


def settings_of(cache: str) -> dict[str, Any]:
    """The settings of the engine that a name stands for."""
    method, _, budget = cache.partition(":")
    if not budget:
        return {"kv_cache_dtype": cache}
    policy = {"method": method, "budget": float(budget)}
    return {"kv_cache_dtype": "float32", "kv_eviction_config": policy}


def row_of(cache: str, found: QualityVerdict, took_s: float) -> list[str]:
    """One row of the table."""
    scores = {task.name.removeprefix("recall, "): task for task in found.tasks}
    cells = []
    for task in TASKS:
        score = scores[task]
        after = "–" if score.right_after is None else f"{score.right_after:.0%}"
        cells.append(f"{score.right_before:.0%} → {after}")
    shown = {check.name: f"{check.measured.mid:.3g}" for check in found.checks}
    return [
        f"`{cache}`",
        found.verdict,
        str(max(score.num_items for score in scores.values())),
        *cells,
        shown.get("KL mean (nats)", ""),
        shown.get("greedy agreement", ""),
        f"{took_s:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--looks", type=int, default=3)
    parser.add_argument("--caches", nargs="+", default=CACHES)
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    limits, size = load_quality_limits()
    shared = {"max_num_seqs": 2, "max_model_len": 2 * args.context + 256}
    rows, raw = [], {}
    with Engine.open(args.model, kv_cache_dtype="float32", **shared) as original:
        source, tokenizer = EngineContexts(original), original.tokenizer
        longest = context_tokens(args.context, original.info.max_model_len)
        recall = RecallReference(recall_texts(tokenizer, longest), source)
        known = ServedReference(texts_to_continue(tokenizer, longest), (), source)
        print(*COLUMNS, sep=" | ", flush=True)
        for cache in args.caches:
            began_s, evicts = time.perf_counter(), ":" in cache
            with Engine.open(args.model, **settings_of(cache), **shared) as engine:
                candidate = EngineContexts(engine)
                part = RecallPart(recall, candidate, limits, size, required=evicts)
                text = ServedTextPart(known, candidate, limits, size) if evicts else None
                panel = SequentialPanel(text, [part], max_looks=args.looks, clock=time.perf_counter)
                panel.run(1e9)
            found = panel.conclude()
            rows.append(row_of(cache, found, time.perf_counter() - began_s))
            raw[cache] = msgspec.to_builtins(found)
            print(*rows[-1], sep=" | ", flush=True)
            if args.result:
                write(args, rows, raw)


def write(args: argparse.Namespace, rows: list[list[str]], raw: dict[str, Any]) -> None:
    """The table and every check."""
    document = {
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python benchmarks/bench_recall_gate.py --context {args.context}"
        f" --looks {args.looks}",
        "note": f"{args.model}, contexts of up to {args.context} tokens, against a float32 cache"
        " that keeps everything; limits: 5 points of recall, 0.01 nats, 97 % equal tokens.",
        "columns": COLUMNS,
        "rows": rows,
        "raw": raw,
    }
    args.result.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
