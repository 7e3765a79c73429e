"""Writes a trace, in Mooncake's format, of requests that share prefixes.

    python benchmarks/prefix_trace.py > trace.jsonl

1,500 requests at 8 per second (Poisson), 20 to 180 tokens out. Each begins with one of 40 prompts
of 3,072 tokens, the k-th 1/k times as often as the first, and ends with 512 that no other has.
"""

from __future__ import annotations

import json
import random


def main() -> None:
    rng, at_ms = random.Random(0), 0.0
    often = [1 / (k + 1) for k in range(40)]
    for number in range(1500):
        at_ms += rng.expovariate(8) * 1000
        (prompt,) = rng.choices(range(40), often)
        blocks = [*(10 * prompt + i for i in range(6)), 100_001 + number]  # of 512 tokens
        out = rng.randint(20, 180)
        row = {"timestamp": round(at_ms), "input_length": 3584, "output_length": out}
        print(json.dumps(row | {"hash_ids": blocks}))


if __name__ == "__main__":
    main()
