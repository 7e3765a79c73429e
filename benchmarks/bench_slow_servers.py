"""Searches and comparisons of servers that start slowly and answer in seconds, in virtual time.

    python benchmarks/bench_slow_servers.py search prefix|slots|llama [--budget 540] [--seeds 100]
        [--equal] [--noise 0.1]
    python benchmarks/bench_slow_servers.py compare prefix|slots|llama [--rounds 3] [--window 9]
        [--seeds 100] [--speed 1.0] [--noise 0.05]

`search` runs whole searches from a handicap of the case (with `--equal` from the same server under
another seed) and counts first verdicts, and results whose closing comparison is certain to gain.
`compare` counts the outcomes of direct comparisons with a server that is `--speed` times as fast.
The servers are those of tests/optimize/simulated_servers.py: run it from the repository's root with
PYTHONPATH=. and expect about 0.2 s of CPU per seed.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

from ridgeline.config.settings import settings_from
from ridgeline.optimize.comparison.load_runner import LoadRunner
from ridgeline.optimize.comparison.paired_comparison import (
    ComparisonSide,
    PairedComparison,
    compare_in_rounds,
)
from ridgeline.optimize.cost import MachinePrice
from ridgeline.optimize.job import OptimizeJob
from ridgeline.optimize.ladder import Ladder, load_default_ladder
from ridgeline.optimize.result import LadderResult
from ridgeline.optimize.search import optimize
from ridgeline.optimize.time_budget import TimeBudget
from ridgeline.records import Slo
from ridgeline.records.progress import silent
from tests.optimize.simulated_servers import Fake, Physics, Quirks, SimulatedDeployment

GOOD = {"model": "demo", "batching": "continuous", "max_num_seqs": 16}
RUNGS = ("cpu-affinity", "token-budget", "numa", "chunked-prefill", "batch-limit")


class Case(NamedTuple):
    """A server, the settings that handicap it, its SLO, its start in s, and its knee in req/s."""

    physics: Physics
    handicap: dict[str, Any]
    slo: str
    open_s: float
    knee: float


CASES = {
    "prefix": Case(
        Physics(fixed_s=0.05, per_seq_s=0.02, per_token_s=0.0033, prompt=512, shared=480, output=8),
        {"enable_prefix_caching": False}, "ttft:2500 tpot:300", 45.0, 0.2),
    "slots": Case(
        Physics(fixed_s=0.07, per_seq_s=0.008, per_token_s=0.0015, prompt=64, shared=0, output=16),
        {"max_num_seqs": 2, "enable_prefix_caching": True}, "ttft:1500 tpot:150", 30.0, 1.2),
    "llama": Case(
        Physics(fixed_s=0.012, per_seq_s=0.009, per_token_s=0.0012, prompt=64, shared=0, output=32),
        {"max_num_seqs": 1, "enable_prefix_caching": True}, "ttft:1500 tpot:100", 2.0, 1.4),
}  # fmt: skip


def search(case: Case, args: argparse.Namespace, seed: int) -> LadderResult:
    """One whole search, from the handicap or between equal servers."""
    physics = replace(case.physics, shared=0) if args.equal else case.physics
    fake = Fake(physics, open_s=case.open_s)
    fake.quirks_of = lambda settings: Quirks(noise=args.noise)  # type: ignore[method-assign]
    start = {"enable_prefix_caching": False} if args.equal else case.handicap
    good = {**GOOD, "enable_prefix_caching": True, **({"seed": 5} if args.equal else {})}
    job = OptimizeJob(
        settings=settings_from({**GOOD, **start}),
        defaults=settings_from(good),
        workload="equal requests",
        slo=Slo.parse(case.slo),
        objective="goodput",
        budget_s=args.budget,
        price=MachinePrice(),
        seed=1000 * seed,
    )
    shipped = load_default_ladder()
    rungs = Ladder(tuple(row for row in shipped.rungs if row.id in RUNGS), shipped.weights)
    return asyncio.run(optimize(job, fake.environment(), rungs, clock=fake.clock))


def compare(case: Case, args: argparse.Namespace, seed: int) -> PairedComparison:
    """One comparison of a server near its knee with one that is `args.speed` times as fast."""
    fake = Fake(replace(case.physics, shared=0))
    budget = TimeBudget(1e9, fake.clock)
    budget.window_s = args.window
    runner = LoadRunner(
        slo=Slo.parse(case.slo), objective="goodput", budget=budget, observer=silent,
        seed=1000 * seed, longest_output=case.physics.output,
    )  # fmt: skip
    values = {**GOOD, **case.handicap}
    a, b = (
        SimulatedDeployment(fake, settings_from({**values, "seed": n}), Quirks(args.noise, speed))
        for n, speed in enumerate((1.0, args.speed))
    )
    knee = case.knee * math.exp(random.Random(seed).gauss(0, 0.2))
    before = ComparisonSide("a", a, knee, settled=True)
    like_rival = args.speed == 1.0 and seed % 2 == 0
    after = ComparisonSide("b", b, knee * args.speed, like_rival=like_rival)
    return asyncio.run(compare_in_rounds(runner, before, after, max_rounds=args.rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["search", "compare"])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--budget", type=float, default=540.0)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--equal", action="store_true")
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=float, default=9.0)
    parser.add_argument("--speed", type=float, default=1.0)
    args = parser.parse_args()
    case, counts, certain = CASES[args.case], Counter[str](), 0
    for seed in range(args.seeds):
        if args.what == "compare":
            counts[compare(case, args, seed).outcome] += 1
            continue
        result = search(case, args, seed)
        first = result.trials[0].verdict if result.trials else "none"
        counts[first] += 1
        certain += first == "kept" and result.total is not None and result.total.low > 1
    shown = ", ".join(f"{name} {number}" for name, number in counts.most_common())
    print(f"{args.case}: {shown}", f"; certain {certain}" if args.what == "search" else "", sep="")


if __name__ == "__main__":
    main()
