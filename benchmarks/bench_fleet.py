"""What a simulated request costs: a fleet of Llama-3.1-8B on H100s, the fast way and step by step.

    python benchmarks/bench_fleet.py request     microseconds of one core per request, both ways
    python benchmarks/bench_fleet.py hour        an hour of 200 requests/s on 100 replicas
    python benchmarks/bench_fleet.py scale       how the cost grows with requests and with replicas
    python benchmarks/bench_fleet.py profile     where the time goes

Requests are Poisson, 910 tokens in and 200 out on average, log-normal. All times are of the process
(CPU time of one core) with the garbage collector off, as `ridgeline simulate` has it; `request`
interleaves both ways and prints medians of five, the slow way with a twentieth of the requests.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import time

import numpy as np

from ridgeline.engine.scheduler import NoPrefixCache, Scheduler, SchedulerLimits, make_policy
from ridgeline.hardware.catalogue import find_accelerator
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.plan.simulate.block_counter import CountingBlockPool
from ridgeline.plan.simulate.fleet import simulate_fleet
from ridgeline.plan.simulate.records import FleetConfig, ReplicaConfig, SimulatedRequest
from ridgeline.plan.step_time.replica import build_replica
from ridgeline.plan.step_time.simulated import ModelledStepTimes

ROUNDS = 5


def make_scheduler() -> Scheduler:
    limits = SchedulerLimits(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=32_768)
    return Scheduler(
        limits, make_policy("continuous"), CountingBlockPool(25_000, 16), NoPrefixCache()
    )


def load(count: int, rate: float, seed: int) -> list[SimulatedRequest]:
    """Log-normal lengths: 910 tokens in and 200 out on average."""
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    prompts = rng.lognormal(6.5, 0.8, count).astype(int).clip(1, 8000).tolist()
    answers = rng.lognormal(4.9, 0.9, count).astype(int).clip(1, 2000).tolist()
    return [
        SimulatedRequest(at_s=at, num_prompt=prompt, num_output=answer)
        for at, prompt, answer in zip(at_s, prompts, answers, strict=True)
    ]


def cost_us(requests: list[SimulatedRequest], replicas: int, fast_forward: bool) -> float:
    machine = build_replica(load_planning_spec("llama-3.1-8b"), find_accelerator("h100-sxm"))
    build = ReplicaConfig(
        name="h100", scheduler=make_scheduler, step_times=ModelledStepTimes(machine)
    )
    plan = FleetConfig(replicas=(build,) * replicas, fast_forward=fast_forward)
    began_s = time.process_time()
    simulate_fleet(requests, plan)
    return (time.process_time() - began_s) / len(requests) * 1e6


def hour(replicas: int, rate: float) -> None:
    """The whole thing for real; an eighth of it first."""
    for count in (int(450 * rate), int(3600 * rate)):
        took_s = cost_us(load(count, rate, 0), replicas, True) * count / 1e6
        each_us = took_s / count * 1e6
        print(f"{count:9,} requests: {took_s:6.1f} s, {each_us:.0f} us each", flush=True)


def scale(count: int, rate: float) -> None:
    """Requests at a fixed fleet, then replicas at a fixed rate and at a fixed load of each."""
    print("| requests | replicas | requests/s | us per request |\n|---|---|---|---|")
    cases = [(each * count, 100, rate) for each in (1, 2, 4, 8)]
    cases += [(count, each, rate) for each in (50, 200, 400)]
    cases += [(count, each, rate * each / 100) for each in (25, 50, 200, 400)]
    for requests, replicas, at in cases:
        microseconds = cost_us(load(requests, at, 0), replicas, True)
        print(f"| {requests:,} | {replicas} | {at:g} | {microseconds:.0f} |", flush=True)


def profile(count: int, replicas: int, rate: float) -> None:
    """Functions by their own time. The profiler itself about doubles it: read the shares."""
    requests = load(count, rate, 0)
    profiler = cProfile.Profile()
    profiler.runcall(cost_us, requests, replicas, True)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def request(count: int, replicas: int, rate: float) -> None:
    """Both ways, interleaved."""
    fast, slow = [], []
    for seed in range(ROUNDS):
        requests = load(count, rate, seed)
        fast.append(cost_us(requests, replicas, True))
        slow.append(cost_us(requests[: count // 20], replicas, False))
    print(f"leaping      {statistics.median(fast):8.0f} us per request")
    print(f"step by step {statistics.median(slow):8.0f} us per request")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("request", "hour", "scale", "profile"))
    parser.add_argument("--requests", type=int, default=10_000, help="default: 10000")
    parser.add_argument("--replicas", type=int, default=100, help="default: 100")
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second (200)")
    given = parser.parse_args()
    gc.disable()
    if given.what == "hour":
        hour(given.replicas, given.rate)
    elif given.what == "scale":
        scale(given.requests, given.rate)
    else:
        chosen = profile if given.what == "profile" else request
        chosen(given.requests, given.replicas, given.rate)


if __name__ == "__main__":
    main()
