"""What a simulated request costs: a fleet of Llama-3.1-8B on H100s, the fast way and step by step.

    python benchmarks/bench_fleet.py [requests] [replicas] [requests per second]
    python benchmarks/bench_fleet.py hour     720,000 requests to 100 replicas, and parts of it

Prints microseconds of one core per request (CPU time), interleaved, medians of five. The slow way
serves a twentieth of the requests.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time

import numpy as np

from ridgeline.engine.core import Limits, NoPrefixCache, Scheduler, make_policy
from ridgeline.hardware.catalogue import find_accelerator
from ridgeline.plan.counted_pool import CountedPool
from ridgeline.plan.fleet import Build, FleetPlan, Request, simulate_fleet
from ridgeline.plan.machine import replica
from ridgeline.plan.outline import load_outline
from ridgeline.plan.pace import Modelled

ROUNDS = 5


def make_scheduler() -> Scheduler:
    limits = Limits(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=32_768)
    return Scheduler(limits, make_policy("continuous"), CountedPool(25_000, 16), NoPrefixCache())


def load(count: int, rate: float, seed: int) -> list[Request]:
    """Log-normal lengths: 910 tokens in and 200 out on average."""
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    prompts = rng.lognormal(6.5, 0.8, count).astype(int).clip(1, 8000).tolist()
    answers = rng.lognormal(4.9, 0.9, count).astype(int).clip(1, 2000).tolist()
    return [
        Request(at_s=at, num_prompt=prompt, num_output=answer)
        for at, prompt, answer in zip(at_s, prompts, answers, strict=True)
    ]


def cost_us(requests: list[Request], replicas: int, leaps: bool) -> float:
    machine = replica(load_outline("llama-3.1-8b"), find_accelerator("h100-sxm"))
    build = Build(name="h100", scheduler=make_scheduler, pace=Modelled(machine))
    plan = FleetPlan(builds=(build,) * replicas, leaps=leaps)
    began_s = time.process_time()
    simulate_fleet(requests, plan)
    return (time.process_time() - began_s) / len(requests) * 1e6


def hour() -> None:
    """The whole thing for real, and how it grows: an eighth of it first."""
    gc.disable()
    for count in (90_000, 720_000):
        requests = load(count, 200.0, 0)
        took_s = cost_us(requests, 100, True) * count / 1e6
        print(
            f"{count:9,} requests: {took_s:6.1f} s, {took_s / count * 1e6:.0f} us each", flush=True
        )


def main() -> None:
    if sys.argv[1:] == ["hour"]:
        hour()
        return
    count, replicas, rate = (
        float(given) if given else default
        for given, default in zip([*sys.argv[1:4], "", "", ""][:3], (10_000, 100, 200), strict=True)
    )
    gc.disable()
    fast, slow = [], []
    for seed in range(ROUNDS):
        requests = load(int(count), rate, seed)
        fast.append(cost_us(requests, int(replicas), True))
        slow.append(cost_us(requests[: int(count) // 20], int(replicas), False))
    print(f"leaping      {statistics.median(fast):8.0f} us per request")
    print(f"step by step {statistics.median(slow):8.0f} us per request")


if __name__ == "__main__":
    main()
