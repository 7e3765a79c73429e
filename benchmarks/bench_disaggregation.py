"""One prefill and one decode server against two whole ones on the same cores, and as simulated.

    python benchmarks/bench_disaggregation.py [MODEL] [--rate R] [--window S] [--rounds N]
        [--long-share X] [--slo-ttft S] [--slo-itl S] [--output FILE]

Four servers with one thread each and three gateways run all the time; the arms take turns within a
round, so that two servers work at any time:

    whole        two servers that do everything
    split        one prefill and one decode server, every prompt through the first
    split-long   the same servers; short prompts are computed by the decode server

Arrivals are Poisson: chats of 60 tokens in and 40 out, and a share of prompts of 800 tokens. ITL is
the gap between two events of a stream; goodput the share of requests whose TTFT and whose 95th
percentile of ITL keep the SLO. `simulated` is `ridgeline simulate`'s fleet on the same requests at
the same instants, with step times fitted to an engine in this process that computed such a load
alone, one thread, right before; it knows neither clients nor other processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from ridgeline.config.settings import settings_from
from ridgeline.engine.build import make_scheduler
from ridgeline.engine.config import resolve
from ridgeline.engine.engine import Engine
from ridgeline.plan.simulate.fleet import simulate_fleet
from ridgeline.plan.simulate.records import FleetConfig, ReplicaConfig, SimulatedRequest
from ridgeline.records import Sampling

SETTINGS: dict[str, Any] = {
    "max_model_len": 1024,
    "num_threads": 1,
    "kv_cache_memory_bytes": 400_000_000,
}
SHORT, LONG, ANSWER = 60, 800, 40
ARMS = ("whole", "split", "split-long")


class Outcome(msgspec.Struct):
    """One request: seconds from its arrival to each event."""

    num_prompt: int
    at_s: float
    events_s: list[float]

    @property
    def gaps_s(self) -> list[float]:
        return np.diff(self.events_s).tolist()


def load(rate: float, window_s: float, long_share: float, seed: int) -> list[tuple[float, int]]:
    """(instant, prompt tokens) of each request."""
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1 / rate, int(rate * window_s * 2) + 8))
    lengths = np.where(rng.random(len(at_s)) < long_share, LONG, SHORT)
    return [(float(a), int(n)) for a, n in zip(at_s, lengths, strict=True) if a < window_s]


def prompt(num: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(100, 4000, num).tolist()


# -- servers


@contextmanager
def process(name: str, *arguments: str) -> Iterator[str]:
    """The URL of a `ridgeline` process on a free port, once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "ridgeline", *arguments, "--port", str(port)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            if child.poll() is not None:
                raise SystemExit(f"{name} ended: {' '.join(command)}")
            try:
                if httpx.get(f"{url}/ready", timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.3)
        yield url
    finally:
        child.terminate()
        child.wait(30)


def server_flags(model: str, mode: str) -> list[str]:
    flags = ["serve", model, "--served-model-name", "m", "--disaggregation-mode", mode]
    for name, value in SETTINGS.items():
        flags += ["--" + name.replace("_", "-"), str(value)]
    return flags


def start(stack: ExitStack, model: str) -> tuple[dict[str, str], str]:
    """URLs of the arms' gateways, and of the decode server."""
    modes = ("none", "none", "prefill", "decode")
    servers = [stack.enter_context(process(mode, *server_flags(model, mode))) for mode in modes]
    first, second, prefill, decode = servers
    pools = ["--prefill-backend", prefill, "--decode-backend", decode]
    return {
        "whole": stack.enter_context(
            process("gateway", "route", "--backend", first, "--backend", second)
        ),
        "split": stack.enter_context(
            process("gateway", "route", *pools, "--prefill-min-tokens", "1")
        ),
        "split-long": stack.enter_context(
            process("gateway", "route", *pools, "--prefill-min-tokens", "400")
        ),
    }, decode


# -- measuring


async def send(http: httpx.AsyncClient, at_s: float, num: int, seed: int) -> Outcome:
    loop = asyncio.get_running_loop()
    body = {
        "model": "m",
        "prompt": prompt(num, seed),
        "max_tokens": ANSWER,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    began_s, events_s = loop.time(), []
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                events_s.append(loop.time() - began_s)
    return Outcome(num, at_s, events_s)


async def run_arm(url: str, requests: Sequence[tuple[float, int]], seed: int) -> list[Outcome]:
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        began_s = time.monotonic()

        async def after(at_s: float, num: int, i: int) -> Outcome:
            await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
            return await send(http, at_s, num, seed * 10_000 + i)

        tasks = [after(at_s, num, i) for i, (at_s, num) in enumerate(requests)]
        return list(await asyncio.gather(*tasks))


def summary(outcomes: Sequence[Outcome], args: argparse.Namespace) -> dict[str, float]:
    ttfts = [own.events_s[0] for own in outcomes]
    gaps = [gap for own in outcomes for gap in own.gaps_s]
    met = [
        own.events_s[0] <= args.slo_ttft and np.percentile(own.gaps_s, 95) <= args.slo_itl
        for own in outcomes
    ]
    tpots = [(o.events_s[-1] - o.events_s[0]) / (len(o.events_s) - 1) for o in outcomes]
    return {
        "num_requests": len(outcomes),
        "ttft_p50_s": float(np.percentile(ttfts, 50)),
        "ttft_p95_s": float(np.percentile(ttfts, 95)),
        "itl_p50_s": float(np.percentile(gaps, 50)),
        "itl_p99_s": float(np.percentile(gaps, 99)),
        "tpot_p50_s": float(np.percentile(tpots, 50)),
        "tpot_p95_s": float(np.percentile(tpots, 95)),
        "goodput": float(np.mean(met)),
    }


def transfers(decode: str) -> dict[str, float]:
    """Counters of the decode server."""
    values: dict[str, float] = {}
    for line in httpx.get(f"{decode}/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("ridgeline_kv_transfer_") and float(value):
            own = name.removeprefix("ridgeline_kv_transfer_").split("{")[0]
            reason = name.partition('reason="')[2].split('"')[0]
            values[f"{own}/{reason}" if reason else own] = float(value)
    return values


# -- simulating


class FittedSteps:
    """Seconds of a step: linear in its new tokens, its sequences, and the tokens they read."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = tuple(weights)

    def step_s(self, shapes: Sequence[tuple[int, int]], num_sampled: int) -> float:
        own = features(shapes)
        return max(1e-4, sum(w * x for w, x in zip(self.weights, own, strict=True)))

    def linear_steps(self, computed: Sequence[int], num_steps: int) -> None:
        return None


def features(shapes: Sequence[tuple[int, int]]) -> list[float]:
    read = sum(new * (cached + new / 2) for new, cached in shapes)
    return [1.0, float(sum(new for new, _ in shapes)), float(len(shapes)), float(read)]


def fit(model: str) -> FittedSteps:
    """Step times of an engine that computes a mixed load alone."""
    with Engine.open(model, **SETTINGS) as engine:
        sampling = Sampling(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
        for i, lengths in enumerate(([SHORT], [SHORT] * 4, [LONG], [SHORT, LONG, SHORT])):
            prompts = [prompt(num, 7_000 + 10 * i + k) for k, num in enumerate(lengths)]
            engine.generate(prompts, [sampling] * len(prompts))
        steps = [step for step in engine.drain_steps() if step.shapes]
    matrix = np.array([features(step.shapes) for step in steps])
    seconds = np.array([step.plan_s + step.run_s for step in steps])
    scale = 1 / np.maximum(seconds, 1e-4)  # relative errors
    weights, *_ = np.linalg.lstsq(matrix * scale[:, None], seconds * scale, rcond=None)
    return FittedSteps(np.maximum(weights, 0).tolist())


def simulated(
    requests: Sequence[tuple[float, int]], steps: FittedSteps, model: str, args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """The figures of `whole` and `split` that the simulator gives."""
    resolved = resolve(settings_from({"model": model, **SETTINGS}))
    replica = ReplicaConfig(
        name="cpu", scheduler=lambda: make_scheduler(resolved), step_times=steps
    )
    own = [SimulatedRequest(at_s=a, num_prompt=n, num_output=ANSWER) for a, n in requests]
    fleets = {
        "whole": FleetConfig(replicas=(replica, replica), fast_forward=False),
        "split": FleetConfig(
            replicas=(replica,),
            decode=(replica,),
            transfer_s=lambda num_tokens: 0.005 + num_tokens * args.bytes_per_token / 1e9,
            fast_forward=False,
        ),
    }
    figures = {}
    for name, fleet in fleets.items():
        done = [o for o in simulate_fleet(own, fleet).requests if not o.error]
        ttfts = [o.first_s - o.request.at_s for o in done]
        tpots = [(o.finished_s - o.first_s) / (ANSWER - 1) for o in done]
        figures[name] = {
            "ttft_p50_s": float(np.percentile(ttfts, 50)),
            "ttft_p95_s": float(np.percentile(ttfts, 95)),
            "tpot_p50_s": float(np.percentile(tpots, 50)),
            "tpot_p95_s": float(np.percentile(tpots, 95)),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--window", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--long-share", type=float, default=0.2)
    parser.add_argument("--slo-ttft", type=float, default=6.0)
    parser.add_argument("--slo-itl", type=float, default=0.3)
    parser.add_argument("--bytes-per-token", type=float, default=46_080)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    steps, rounds = fit(args.model), []
    print("fitted step:", [f"{w:.2e}" for w in steps.weights], flush=True)
    with ExitStack() as stack:
        urls, decode = start(stack, args.model)
        for url in urls.values():  # first requests find routes built and memory touched
            asyncio.run(run_arm(url, [(0.0, LONG), (0.1, SHORT)], 999))
        for i in range(args.rounds):
            requests = load(args.rate, args.window, args.long_share, i)
            measured = {}
            for k in range(len(ARMS)):
                arm = ARMS[(i + k) % len(ARMS)]
                seed = 10 * i + k + 1  # no arm finds the prompts of another one
                measured[arm] = summary(asyncio.run(run_arm(urls[arm], requests, seed)), args)
                print(i, arm, {k: round(v, 3) for k, v in measured[arm].items()}, flush=True)
            model = simulated(requests, steps, args.model, args)
            rounds.append(
                {"measured": measured, "simulated": model, "load_average": os.getloadavg()[0]}
            )
            print(i, "simulated", json.dumps(model), flush=True)
        moved = transfers(decode)
    result = {
        "model": args.model,
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "fitted_step_s": steps.weights,
        "rounds": rounds,
        "decode_server": moved,
    }
    print(json.dumps(moved))
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
