"""Requests through a prefill and a decode engine while blocks are corrupted, withheld and cut off.

python -m tests.engine.kv_transfer.random_faults --fetches 10000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ridgeline.engine.engine import Engine
from ridgeline.engine.kv_transfer import block_server
from ridgeline.engine.kv_transfer.block_server import BlockServer
from ridgeline.records import Sampling
from tests.engine.kv_transfer.two_engines import (
    SETTINGS,
    client_of,
    complete,
    hand_over,
    two_engines,
)

FAULTS = ("none", "corrupt", "withhold", "break_off")


@contextmanager
def faulty_server(rng: random.Random, share: float) -> Iterator[None]:
    """Block servers that fail in a share of their sendings."""
    original = BlockServer._send

    def send(self: BlockServer, connection: Any, blocks: Any, *, inline: bool) -> None:
        fault = rng.choice(FAULTS[1:]) if rng.random() < share else "none"
        if fault == "break_off":
            connection.shutdown(socket.SHUT_RDWR)
        elif fault == "withhold":
            original(self, connection, blocks[: rng.randrange(len(blocks))], inline=inline)
        elif fault == "corrupt":
            row = self._slab.row(blocks[0][1])
            place = rng.randrange(len(row))

            def crc32(data: memoryview) -> int:  # the bytes change after their checksum was taken
                checksum = zlib.crc32(data)
                row[place] ^= 1
                return checksum

            with mock.patch.object(block_server, "zlib", SimpleNamespace(crc32=crc32)):
                original(self, connection, blocks, inline=inline)
        else:
            original(self, connection, blocks, inline=inline)

    with mock.patch.object(BlockServer, "_send", send):
        yield


def run_with_faults(
    num_fetches: int, seed: int, *, share: float = 0.3, model: str = "demo", **settings: Any
) -> dict[str, Any]:
    """Send random requests until there were that many fetches; compare each answer with that of one
    engine that computes everything itself."""
    rng, began_s = random.Random(seed), time.perf_counter()
    num_requests = num_wrong = 0
    with (
        Engine.open(model, **SETTINGS | settings) as alone,
        two_engines(model, **settings) as (prefill, decode),
        faulty_server(rng, share),
    ):
        client = client_of(decode)

        async def some() -> None:
            nonlocal num_requests, num_wrong
            prompts = [
                [rng.randrange(5, 60) for _ in range(rng.randrange(17, 90))] for _ in range(8)
            ]
            samplings = [
                Sampling(temperature=rng.choice((0.0, 1.0)), seed=rng.randrange(99), max_tokens=2)
                for _ in prompts
            ]
            pairs = list(zip(prompts, samplings, strict=True))
            expected = await asyncio.gather(*[complete(alone, *pair) for pair in pairs])
            answers = await asyncio.gather(*[hand_over(prefill, decode, *pair) for pair in pairs])
            num_requests += len(prompts)
            num_wrong += sum(map(lambda a, b: a != b, answers, expected))

        while client.num_fetches < num_fetches:
            asyncio.run(some())
        open_leases = len(prefill.transfers.leases)  # type: ignore[attr-defined]
        return {
            "fetches": client.num_fetches,
            "blocks": client.num_blocks,
            "requests": num_requests,
            "wrong": num_wrong,
            "fallbacks": {reason: num for reason, num in client.fallbacks.items() if num},
            "open_leases": open_leases,
            "seconds": round(time.perf_counter() - began_s, 1),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fetches", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--kv-cache-dtype", default="auto")
    args = parser.parse_args()
    result = run_with_faults(
        args.fetches, args.seed, model=args.model, kv_cache_dtype=args.kv_cache_dtype
    )
    print(json.dumps(result))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
