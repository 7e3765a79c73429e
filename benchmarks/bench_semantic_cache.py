"""How well a model's embeddings tell questions that mean the same from those that only look alike.

    python benchmarks/bench_semantic_cache.py [--model smollm2] [--pairs FILE.jsonl]

For each pooling, with and without the common part of all embeddings (the centre), prints the
similarities of both kinds of pairs, the share of equal pairs that hit at false-hit rates of 0, 5
and 20 %, and what `--semantic-cache-pairs` would make of the file at limits of 5, 10 and 20 %; then
the time of one embedding; then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline import Engine
from ridgeline.errors import UserError
from ridgeline.hub.download import ensure_downloaded
from ridgeline.similarity import (
    QuestionPair,
    calibrate,
    read_pairs,
    similarities,
)

PAIRS = Path(__file__).parent / "data" / "question_pairs.jsonl"


def separation(
    pairs: list[QuestionPair], vectors: dict[str, Any], centre: np.ndarray
) -> dict[str, Any]:
    """Medians of both kinds, and hits at three rates of false ones; nearest of all first texts."""
    first = [pair.a for pair in pairs]
    nearest: dict[bool, np.ndarray] = {}
    for kind in (True, False):
        second = [pair.b for pair in pairs if pair.equal is kind]
        nearest[kind] = similarities(second, first, vectors, centre).max(axis=1)
    own = [similarities([p.b], [p.a], vectors, centre)[0, 0] for p in pairs if p.equal]
    hits = {}
    for rate in (0.0, 0.05, 0.2):
        threshold = float(np.quantile(nearest[False], 1 - rate))
        hits[f"{rate:g}"] = float(np.mean(np.asarray(own) > threshold))
    return {
        "equal": statistics.median(map(float, own)),
        "different": float(np.median(nearest[False])),
        "hits_at_false_rate": hits,
    }


def calibrated(pairs: list[QuestionPair], vectors: dict[str, Any]) -> dict[str, str]:
    """The outcome of the calibration by its limit."""
    outcomes = {}
    for limit in (0.05, 0.1, 0.2):
        try:
            outcomes[f"{limit:g}"] = str(calibrate(pairs, vectors.__getitem__, limit))
        except UserError as error:
            outcomes[f"{limit:g}"] = f"refused: {error}"
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--pairs", type=Path, default=PAIRS)
    args = parser.parse_args()
    ensure_downloaded(args.model)
    pairs = read_pairs(args.pairs)
    texts = sorted({text for pair in pairs for text in (pair.a, pair.b)})
    report: dict[str, Any] = {"model": args.model, "texts": len(texts), "pairs": len(pairs)}
    with Engine.open(args.model, max_model_len=512) as engine:
        for pooling in ("mean", "last"):
            seconds, vectors = [], {}
            for text in texts:
                tokens, begun = engine.tokenizer.encode(text), time.perf_counter()
                vectors[text] = engine.embed(tokens, pooling).result()
                seconds.append(time.perf_counter() - begun)
            centre = np.mean([vectors[t] for p in pairs if p.equal for t in (p.a, p.b)], axis=0)
            report[pooling] = {
                "plain": separation(pairs, vectors, np.zeros_like(centre)),
                "centred": separation(pairs, vectors, centre),
                "calibration": calibrated(pairs, vectors),
                "embedding_ms": 1000 * statistics.median(seconds),
            }
            print(f"{pooling}: {json.dumps(report[pooling], indent=2)}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
