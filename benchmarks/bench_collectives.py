"""Sums between two ranks of one host: in shared memory against gloo, by size of the message.

    python benchmarks/bench_collectives.py [--rounds N]

Both ways sum the same tensors in turn, so that other work on the machine hits both alike. Prints
the median and the 90th percentile of a sum in microseconds and the ratio of the medians, and checks
that both have the same bits.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from ridgeline.engine.parallel.exchange.base import Collectives
from ridgeline.engine.parallel.exchange.connect import make_collectives
from ridgeline.engine.parallel.exchange.shared_memory import create_segment
from ridgeline.modelspec.shard import ParallelSizes, Shard

SIZES = (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
TWO_RANKS = ParallelSizes(tensor=2)


def sum_us(collectives: Collectives, x: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Microseconds of a sum, once both ranks are there, and the sum."""
    collectives.maximum(torch.zeros(1))
    began_s = time.perf_counter()
    total = collectives.sum_parts(x.clone())
    return (time.perf_counter() - began_s) * 1e6, total


def measure(rank: int, segment: int, store: str, rounds: int) -> None:
    """Every size, both ways in turn; rank 0 prints."""
    torch.set_num_threads(1)
    shard = Shard(sizes=TWO_RANKS, rank=rank)
    ways = {
        "gloo": make_collectives(shard, 60.0, None),
        "shm": make_collectives(shard, 60.0, segment),
    }
    for way in ways.values():
        way.connect(store)
    for size in SIZES:
        times: dict[str, list[float]] = {name: [] for name in ways}
        for i in range(rounds):
            x = torch.randn(size // 4, generator=torch.Generator().manual_seed(2 * i + rank))
            totals = []
            for name, way in ways.items():
                took_us, total = sum_us(way, x)
                times[name].append(took_us)
                totals.append(total)
            assert torch.equal(*totals), "both ways add in the order of ranks"
        if rank:
            continue
        medians = {name: statistics.median(own) for name, own in times.items()}
        tails = {name: statistics.quantiles(own, n=10)[-1] for name, own in times.items()}
        shown = "  ".join(f"{name} {medians[name]:8.0f} (p90 {tails[name]:8.0f})" for name in ways)
        print(f"{size:8} bytes  {shown} us  shm/gloo {medians['shm'] / medians['gloo']:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--child", nargs=2, metavar=("FD", "STORE"))
    asked = parser.parse_args()
    if asked.child:
        measure(1, int(asked.child[0]), asked.child[1], asked.rounds)
        return
    segment = create_segment(2)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        own = [sys.executable, __file__, "--rounds", str(asked.rounds)]
        child = subprocess.Popen([*own, "--child", str(segment), store], pass_fds=[segment])
        try:
            measure(0, segment, store, asked.rounds)
        finally:
            child.wait()


if __name__ == "__main__":
    main()
