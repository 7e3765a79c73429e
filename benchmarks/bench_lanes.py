"""The effect of background requests on interactive latency, interleaved.

    python benchmarks/bench_lanes.py [--model demo] [--background-tokens N] [--ttft-ms MS]
        [--tpot-ms MS] [--pause-ms MS] [--rounds N]

Three arms on one engine: interactive requests alone; with batch requests in the background lane;
with the same batch requests as ordinary requests. Interactive requests are sent one after another,
each after a pause in which batch requests have the engine to themselves. Prints medians over rounds
of each arm's p50 and p95, the share of interactive requests that met the SLO, and the tokens per
second of the batch requests.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import statistics
import time
from dataclasses import dataclass, field

from ridgeline.engine.engine import Engine
from ridgeline.records import Sampling, Slo, Token

PROMPT = "def read_lines(path):\n    with open(path) as file:\n"
BATCH_PROMPT = "import os\nimport sys\n\n\nclass Reader:\n    " * 12
OUTPUT_LEN = 24
INTERACTIVE = Sampling(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
BATCH = Sampling(temperature=0.0, max_tokens=64, ignore_eos=True)
NUM_INTERACTIVE, NUM_BATCH = 12, 16
ARMS = {"alone": None, "background": True, "ordinary": False}


@dataclass
class RoundTimes:
    """Seconds of one round."""

    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    num_batch_tokens: int = 0
    wall_s: float = 0.0


async def send_interactive(engine: Engine, number: int, times: RoundTimes, slo: Slo | None) -> None:
    sent_s = first_s = last_s = time.perf_counter()
    first = True
    async for event in engine.stream(f"# {number}\n{PROMPT}", INTERACTIVE, slo=slo):
        if isinstance(event, Token):
            now_s = time.perf_counter()
            (times.ttft_s if first else times.itl_s).append(now_s - (sent_s if first else last_s))
            first_s, last_s, first = now_s if first else first_s, now_s, False
    times.tpot_s.append((last_s - first_s) / (OUTPUT_LEN - 1))


async def send_batch(
    engine: Engine, numbers: itertools.count[int], times: RoundTimes, background: bool
) -> None:
    while True:
        text = f"# {next(numbers)}\n{BATCH_PROMPT}"
        async for event in engine.stream(text, BATCH, background=background):
            times.num_batch_tokens += isinstance(event, Token)


async def run_round(
    engine: Engine,
    background: bool | None,
    numbers: itertools.count[int],
    slo: Slo | None,
    pause_s: float,
) -> RoundTimes:
    times = RoundTimes()
    batch = [] if background is None else range(NUM_BATCH)
    tasks = [
        asyncio.ensure_future(send_batch(engine, numbers, times, bool(background))) for _ in batch
    ]
    await asyncio.sleep(0.3)
    times.num_batch_tokens, began_s = 0, time.perf_counter()
    for at in range(NUM_INTERACTIVE):
        await asyncio.sleep(pause_s * (0.5 + (at * 0.618) % 1.0))
        await send_interactive(engine, next(numbers), times, slo)
    times.wall_s = time.perf_counter() - began_s
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return times


def seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def slo_attainment(times: RoundTimes, slo: Slo) -> float:
    """The share of interactive requests that met every limit."""
    pairs = list(zip(times.ttft_s, times.tpot_s, strict=True))
    good = [
        ttft_s <= (slo.ttft_s or math.inf) and tpot_s <= (slo.tpot_s or math.inf)
        for ttft_s, tpot_s in pairs
    ]
    return sum(good) / len(good)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--background-tokens", type=int, help="default: derived")
    parser.add_argument("--ttft-ms", type=float, help="latency limit of interactive requests")
    parser.add_argument("--tpot-ms", type=float, help="latency limit of interactive requests")
    parser.add_argument(
        "--pause-ms", type=float, default=100.0, help="mean, before each interactive request"
    )
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    slo = Slo(ttft_s=seconds(given.ttft_ms), tpot_s=seconds(given.tpot_ms))
    numbers, pause_s = itertools.count(), given.pause_ms / 1000
    rounds: dict[str, list[RoundTimes]] = {arm: [] for arm in ARMS}

    async def measure(engine: Engine) -> None:
        for _ in range(given.rounds):
            for arm, background in ARMS.items():
                rounds[arm].append(await run_round(engine, background, numbers, slo, pause_s))

    settings = {"max_num_seqs": 16, "background_tokens": given.background_tokens}
    with Engine.open(given.model, **settings) as engine:
        asyncio.run(measure(engine))
        print(engine.info.derivations["background_tokens"])
    print(f"{'':11} {'ttft p50':>9} {'p95':>8} {'itl p50':>9} {'p95':>8}    SLO   batch tok/s")
    for arm, runs in rounds.items():
        columns = [
            statistics.median(f(getattr(times, name)) * 1000 for times in runs)
            for name in ("ttft_s", "itl_s")
            for f in (statistics.median, p95)
        ]
        rate = statistics.median(times.num_batch_tokens / times.wall_s for times in runs)
        shown = (
            f"{columns[0]:6.1f} ms {columns[1]:5.1f} ms {columns[2]:6.2f} ms {columns[3]:5.2f} ms"
        )
        share = statistics.fmean(slo_attainment(times, slo) for times in runs)
        print(f"{arm:11} {shown} {share:6.1%} {rate:13.0f}")


if __name__ == "__main__":
    main()
