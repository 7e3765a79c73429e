"""A fleet of twins behind the gateway against `ridgeline simulate` of the same fleet.

An hour of traffic in two waves goes to up to 16 twins (llama-3.1-8b on an L4 each) through the real
gateway, with failures and autoscaling, on virtual time. The simulator gets the same trace. Goodput
is that of requests within the SLO. With --shifted, the simulator also gets the trace that many
times with every arrival moved by up to 2 ms: what lies within their range is no difference.

    python benchmarks/bench_twin_fleet.py [--seconds 3600] [--routers NAME…] [--shifted 6]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ridgeline.plan.simulate.records import (
    Autoscaling,
    FaultModel,
    RequestOutcome,
    SimulatedRequest,
)
from ridgeline.records import Slo
from ridgeline.twin.config import TwinConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.fleet.twin_fleet import TwinFleetPlan, goodput, rehearse, simulate_same, waves

SLO = "ttft:8000 tpot:80"
SHIFT_S = 0.002


def figures(outcomes: Sequence[RequestOutcome], slo: Slo, seconds: float) -> dict[str, float]:
    done = [outcome for outcome in outcomes if not math.isnan(outcome.finished_s)]
    ttfts = sorted(outcome.first_s - outcome.request.at_s for outcome in done)
    return {
        "num_requests": len(outcomes),
        "num_finished": len(done),
        "goodput_req_s": round(goodput(outcomes, slo, seconds), 4),
        "ttft_p50_s": round(ttfts[len(ttfts) // 2], 3),
        "ttft_p95_s": round(ttfts[int(0.95 * len(ttfts))], 3),
    }


def shifted(
    plan: TwinFleetPlan, requests: Sequence[SimulatedRequest], slo: Slo, seconds: float, count: int
) -> dict[str, list[float]]:
    """Least and greatest figures of the simulator for the trace with other arrivals."""
    runs = []
    for seed in range(1, count + 1):
        rng = random.Random(seed)
        moved = [msgspec.structs.replace(r, at_s=r.at_s + SHIFT_S * rng.random()) for r in requests]
        runs.append(figures(simulate_same(plan, moved).requests, slo, seconds))
    names = ("goodput_req_s", "ttft_p50_s", "ttft_p95_s") if runs else ()
    return {name: [f(run[name] for run in runs) for f in (min, max)] for name in names}


def compare(
    plan: TwinFleetPlan, seconds: float, rates: tuple[float, float], num_shifted: int = 0
) -> dict[str, object]:
    """Goodput and latencies of the twins and of the simulator for one fleet."""
    requests, slo = waves(seconds, *rates, 5000, 32), Slo.parse(SLO)
    began_s = time.process_time()
    outcomes, fleet = rehearse(plan, requests)
    cpu_s = time.process_time() - began_s
    simulated = simulate_same(plan, requests)
    ours = figures(outcomes, slo, seconds)
    theirs = figures(simulated.requests, slo, seconds)
    ratio = ours["goodput_req_s"] / max(1e-9, theirs["goodput_req_s"])
    return {
        "router": plan.router,
        "twins": ours,
        "simulated": theirs,
        "simulated_shifted": shifted(plan, requests, slo, seconds, num_shifted),
        "goodput_ratio": round(ratio, 4),
        "num_killed": fleet.num_killed,
        "num_resumed": fleet.metric("ridgeline_fleet_resumed_total"),
        "num_lost": fleet.metric("ridgeline_fleet_lost_total"),
        "num_twins": len(fleet.places),
        "num_simulated_replicas": len(simulated.replicas),
        "cpu_seconds_to_rehearse": round(cpu_s, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--routers", nargs="+", default=["least-loaded", "ttft"])
    parser.add_argument("--shifted", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    twin = TwinConfig(
        model="llama-3.1-8b", device="l4", max_num_seqs=2, enable_prefix_caching=False
    )
    scaling = Autoscaling(
        target=2,
        min_replicas=args.replicas // 4,
        max_replicas=args.replicas,
        interval_s=15,
        startup_s=60,
        stable_s=120,
    )
    faults = FaultModel(mtbf_s=1200.0, repair_s=60.0)
    high = 0.22 * args.replicas
    results = []
    for router in args.routers:
        plan = TwinFleetPlan(
            twin=twin,
            count=args.replicas // 4,
            router=router,
            scaling=scaling,
            faults=faults,
            probe_s=3.0,
        )
        results.append(compare(plan, args.seconds, (high / 5, high), args.shifted))
        print(json.dumps(results[-1]), flush=True)
    record = {
        "benchmark": "twin-fleet",
        "twin": twin.description,
        "model": twin.model,
        "replicas": args.replicas,
        "seconds": args.seconds,
        "requests_per_s": [round(high / 5, 2), round(high, 2)],
        "slo": SLO,
        "results": results,
    }
    if args.output is not None:
        args.output.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
