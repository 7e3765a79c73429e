"""Twins measured over HTTP against `predict` and `simulate` of the same points, on virtual time.

Each command line's twin runs behind the gateway in this process (tests/fleet/twin_fleet.py): real
HTTP, server, engine loop and scheduler, and a clock that only steps move, so that a busy machine
changes nothing. `alone`: a request alone, against the simulator and against `predict`. `load`: mean
TTFT, mean TPOT and goodput of Poisson arrivals, about four requests at once, against the simulator
on the same trace. Exits with 1 if an error exceeds --limit.

    PYTHONPATH=. python benchmarks/bench_twin.py [--requests 40] [--limit 0.03] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ridgeline.plan.simulate.records import RequestOutcome, SimulatedRequest
from ridgeline.plan.step_time.operating_point import OperatingPoint
from ridgeline.plan.step_time.predict import predict
from ridgeline.records import Slo
from ridgeline.twin.servers.behaviour import TwinRun, twin_of
from ridgeline.twin.servers.command_line import read_command
from tests.fleet.twin_fleet import TwinFleetPlan, goodput, rehearse, simulate_same

AT_ONCE = 4.0  # requests in flight that the load aims at


class Point(NamedTuple):
    """A server's command line, its device, and the lengths of its requests."""

    command: str
    device: str
    num_prompt: int
    num_output: int
    predicted: bool = True  # `predict` has no host that waits for steps, as llama.cpp's does


POINTS = (
    Point("vllm serve llama-3.1-8b", "h100-sxm", 2048, 64),
    Point("vllm serve llama-3.1-8b --max-num-seqs 2", "l4", 1024, 32),
    Point("vllm serve llama-3.1-70b -tp 4 --quantization fp8", "h100-sxm", 4096, 32),
    Point("vllm serve llama-3.1-8b --enforce-eager", "a100-80-sxm", 2048, 64, False),
    Point("sglang serve --model-path llama-3.1-8b", "h200-sxm", 4096, 64),
    Point("sglang serve --model-path llama-3.1-8b --chunked-prefill-size 512", "l40s", 3000, 32),
    Point("trtllm-serve llama-3.1-8b --kv_cache_dtype fp8", "h100-sxm", 2048, 64),
    Point("text-generation-launcher --model-id llama-3.1-8b --quantize fp8", "l40s", 1024, 48),
    Point("llama-server -m llama-3.1-8b --parallel 8", "l4", 512, 32, False),
)


class Means(NamedTuple):
    """Of the requests of one run: seconds, and requests/s within the SLO."""

    ttft_s: float
    tpot_s: float
    goodput: float


def means(outcomes: Sequence[RequestOutcome], slo: Slo) -> Means:
    lost = [o.error or "unfinished" for o in outcomes if o.error or math.isnan(o.finished_s)]
    if lost:
        raise SystemExit(f"{len(lost)} requests were lost: {lost[0]}")
    ttft_s = [o.first_s - o.request.at_s for o in outcomes]
    tpot_s = [(o.finished_s - o.first_s) / (o.request.num_output - 1) for o in outcomes]
    end_s = max(o.finished_s for o in outcomes)
    return Means(float(np.mean(ttft_s)), float(np.mean(tpot_s)), goodput(outcomes, slo, end_s))


def errors_of(point: Point, num_requests: int) -> dict[str, float]:
    """Relative errors of the twin by what they were compared with."""
    _, line = read_command(point.command)
    config = twin_of(line, TwinRun(device=point.device, num_devices=8))
    plan = TwinFleetPlan(twin=config, count=1)
    alone = [SimulatedRequest(at_s=0.0, num_prompt=point.num_prompt, num_output=point.num_output)]
    any_slo = Slo.parse("ttft:100000")
    twin, simulated = (
        means(rehearse(plan, alone)[0], any_slo),
        means(simulate_same(plan, alone).requests, any_slo),
    )
    errors = {
        "alone, TTFT": twin.ttft_s / simulated.ttft_s - 1,
        "alone, TPOT": twin.tpot_s / simulated.tpot_s - 1,
    }
    if point.predicted:
        known = predict(
            OperatingPoint(
                model=line.model,
                device=point.device,
                isl=point.num_prompt,
                osl=point.num_output,
                tp=line.tp,
                max_num_batched_tokens=config.max_num_batched_tokens,
                weight_dtype=config.weight_dtype,
                kv_dtype=config.kv_dtype,
            )
        )
        errors["alone, TTFT, predict"] = 1000 * twin.ttft_s / known.ttft_ms - 1
        errors["alone, TPOT, predict"] = 1000 * twin.tpot_s / known.tpot_ms - 1
    rate = AT_ONCE / (twin.ttft_s + twin.tpot_s * point.num_output)
    load = arrivals(point, min(rate, line.max_num_seqs / AT_ONCE * rate), num_requests)
    simulated_load = simulate_same(plan, load).requests
    usual = means(simulated_load, any_slo)
    slo = Slo.parse(f"ttft:{1000 * usual.ttft_s:.3f} tpot:{1200 * usual.tpot_s:.3f}")
    ours = means(rehearse(plan, load)[0], slo)
    theirs = means(simulated_load, slo)
    errors["load, TTFT"] = ours.ttft_s / theirs.ttft_s - 1
    errors["load, TPOT"] = ours.tpot_s / theirs.tpot_s - 1
    errors["load, goodput"] = ours.goodput / theirs.goodput - 1
    return {name: round(value, 5) for name, value in errors.items()}


def arrivals(point: Point, rate: float, count: int) -> list[SimulatedRequest]:
    """Poisson arrivals of requests that are half to one and a half times as long."""
    rng, at_s, requests = np.random.default_rng(0), 0.0, list[SimulatedRequest]()
    for _ in range(count):
        at_s += float(rng.exponential(1 / rate))
        num_prompt = int(point.num_prompt * rng.uniform(0.5, 1.5))
        num_output = max(2, int(point.num_output * rng.uniform(0.5, 1.5)))
        requests.append(SimulatedRequest(at_s=at_s, num_prompt=num_prompt, num_output=num_output))
    return requests


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--limit", type=float, default=0.03)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = []
    for point in POINTS:
        errors = errors_of(point, args.requests)
        rows.append({"command": point.command, "device": point.device, "errors": errors})
        shown = " · ".join(f"{name} {value:.2%}" for name, value in errors.items())
        print(f"{point.command} on {point.device}\n  {shown}", flush=True)
    worst = max(abs(value) for row in rows for value in row["errors"].values())
    print(f"largest error {worst:.2%}")
    if args.output is not None:
        record = {"benchmark": "twin", "requests": args.requests, "points": rows}
        args.output.write_text(json.dumps(record, indent=2) + "\n")
    return int(worst > args.limit)


if __name__ == "__main__":
    sys.exit(main())
