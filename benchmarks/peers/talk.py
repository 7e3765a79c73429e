"""What every worker speaks: one JSON line in, one JSON line out. Standard library only.

A worker holds one engine. `prepare` gets it ready for a work, `run` does a slice of it, timed:

    {"do": "prepare", "work": {"kind": "decode", "sequences": 8, "context": 128}}
    {"do": "run", "steps": 16}            ->  {"seconds": 0.31, "tokens": 128}

Works: `decode` (a number of sequences, each after a number of tokens; a run is `steps` tokens of
each), `prefill` (a run is one prompt of `tokens` tokens, up to its first token), `chat` (a run is a
closed loop of `clients`, `requests` in all, `input` and `output` tokens each).
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

VOCAB = 32_000


class Engine(Protocol):
    def prepare(self, work: dict[str, Any]) -> None: ...
    def run(self, order: dict[str, Any]) -> int:
        """Do it; the tokens that it made (prefill: that it read)."""
        ...


def serve(make: Callable[[], Engine]) -> None:
    """Answer orders until standard input ends. What engines print goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    begun = time.perf_counter()
    engine = make()
    _say(out, {"ready_s": time.perf_counter() - begun, "rss_bytes": rss()})
    for line in sys.stdin:
        order = json.loads(line)
        begun = time.perf_counter()
        if order["do"] == "prepare":
            engine.prepare(order["work"])
            _say(out, {"seconds": time.perf_counter() - begun, "rss_bytes": rss()})
        else:
            tokens = engine.run(order)
            _say(out, {"seconds": time.perf_counter() - begun, "tokens": tokens})


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Random token ids; no two prompts begin alike."""
    draw = random.Random(seed)
    return [[draw.randrange(300, VOCAB) for _ in range(length)] for _ in range(count)]


def rss() -> int:
    """Peak resident bytes of this process."""
    with Path("/proc/self/status").open(encoding="utf-8") as file:
        found = next(line for line in file if line.startswith("VmHWM:"))
    return int(found.split()[1]) * 1024


def _say(out: Any, answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()
