"""What a step costs in Python: `plan`, and `plan` + `commit`, with 64 running and 1,000 waiting.

    python benchmarks/bench_scheduler.py [--running 64] [--waiting 1000] [--context 1024] [--steps
    300]

Prints medians in microseconds for several situations, then one JSON line. The target is a plan
under 1,000 µs: a step of the smallest useful model takes longer than that on any device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

from ridgeline.engine.scheduler import (
    BlockPool,
    NoPrefixCache,
    PrefixCache,
    Scheduler,
    SchedulerLimits,
    make_policy,
)
from ridgeline.engine.scheduler.plan import RunOutput, StepPlan, StepResult
from ridgeline.records import Request, Sampling

ENDLESS = 1_000_000
BLOCK_SIZE = 16


def scripted(plan: StepPlan) -> StepResult:
    """A runner that costs next to nothing."""
    done, none = RunOutput((7,)), RunOutput()
    return StepResult(tuple(done if run.sample else none for run in plan.runs))


def make_request(number: int, num_prompt: int, sampling: Sampling) -> Request:
    prompt = (number, *range(1, num_prompt))
    return Request(id=str(number), prompt=prompt, sampling=sampling, arrival_s=float(number))


def busy(args: argparse.Namespace, *, prefix: bool, sampling: Sampling) -> Scheduler:
    """A scheduler whose slots are all taken by decoding sequences, with a queue behind them."""
    num_blocks = args.running * (args.context + args.steps + 4 * args.running) // BLOCK_SIZE * 2
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    limits = SchedulerLimits(
        max_num_seqs=args.running,
        max_num_batched_tokens=args.context + args.running,
        max_model_len=num_blocks * BLOCK_SIZE,
    )
    cache = PrefixCache(pool) if prefix else NoPrefixCache()
    scheduler = Scheduler(limits, make_policy("continuous"), pool, cache)
    for number in range(args.running + args.waiting):
        scheduler.add(make_request(number, args.context, sampling))
    for _ in range(args.running):  # one prompt joins in every step
        step(scheduler, 0.0)
    return scheduler


def step(scheduler: Scheduler, now_s: float) -> tuple[float, float]:
    """One step; seconds of plan, and of plan and commit."""
    begin = time.perf_counter()
    plan = scheduler.plan(now_s)
    planned = time.perf_counter()
    result = scripted(plan)
    ran = time.perf_counter()
    scheduler.commit(plan, result, now_s)
    return planned - begin, planned - begin + time.perf_counter() - ran


def situations(args: argparse.Namespace) -> dict[str, Callable[[], Scheduler]]:
    wanted = args.steps + 2 * args.running
    plain = Sampling(max_tokens=wanted)
    penalties = Sampling(max_tokens=wanted, presence_penalty=0.5)
    return {
        "decode": lambda: busy(args, prefix=True, sampling=plain),
        "decode, no prefix cache": lambda: busy(args, prefix=False, sampling=plain),
        "decode, penalties": lambda: busy(args, prefix=True, sampling=penalties),
    }


def measure(scheduler: Scheduler, steps: int) -> dict[str, float]:
    times = [step(scheduler, float(i)) for i in range(steps)]
    plan, both = ([pair[i] * 1e6 for pair in times] for i in (0, 1))
    return {
        "plan_us": statistics.median(plan),
        "plan_p99_us": sorted(plan)[int(0.99 * (steps - 1))],
        "plan_commit_us": statistics.median(both),
    }


def churn(args: argparse.Namespace) -> dict[str, float]:
    """In every step one request finishes and another joins, with a prompt to be hashed."""
    scheduler = busy(args, prefix=True, sampling=Sampling(max_tokens=args.running))
    return measure(scheduler, min(args.steps, args.waiting // 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("running", 64), ("waiting", 1000), ("context", 1024), ("steps", 300)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    rows = {name: measure(make(), args.steps) for name, make in situations(args).items()}
    rows["joining and leaving"] = churn(args)
    print(f"{args.running} running, {args.waiting} waiting, context {args.context} tokens")
    for name, row in rows.items():
        print(f"  {name:26}" + "".join(f"{key} {value:8.0f}   " for key, value in row.items()))
    print(json.dumps({"bench": "scheduler", **vars(args), "rows": rows}))


if __name__ == "__main__":
    main()
