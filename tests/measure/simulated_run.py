"""Runs of a load against a server in virtual time, with the noise of a real machine.

The server batches continuously: a step takes a base time, more for every running sequence and for
every new prompt, and gives each running sequence one token. Requests queue, so that a slower
machine is slower by more than its steps.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec

from ridgeline.measure.results.result_file import LoadedResult

NUM_TOKENS = 32
STEP_S, SEQUENCE_S, PROMPT_S = 0.008, 0.0012, 0.012


class Noise(msgspec.Struct, frozen=True):
    """`run_sd`: of the machine's speed from run to run, and `step_sd` from step to step, of the
    logarithm. `stalls_per_s`: pauses, 60 ms on average, in which nothing is computed."""

    run_sd: float = 0.012
    stalls_per_s: float = 0.3
    step_sd: float = 0.1


TYPICAL = Noise()


def simulated_runs(
    seed: str,
    num_runs: int,
    *,
    slower: float = 0.0,
    noise: Noise = TYPICAL,
    num_requests: int = 40,
    rate: float = 12.0,
) -> list[LoadedResult]:
    """One side of a comparison. Run k has load k on both sides; `seed` is of the noise."""
    runs = []
    for number in range(num_runs):
        arrivals = _arrivals(random.Random(number), num_requests, rate)
        rng = random.Random(f"{seed}/{number}")
        speed = (1 + slower) * math.exp(rng.gauss(0, noise.run_sd))
        runs.append(_result(f"{seed}/{number}", arrivals, _serve(arrivals, speed, noise, rng)))
    return runs


def _arrivals(rng: random.Random, count: int, rate: float) -> list[float]:
    at_s, arrivals = 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(rate)
        arrivals.append(at_s)
    return arrivals


def _serve(
    arrivals: Sequence[float], speed: float, noise: Noise, rng: random.Random
) -> list[list[float]]:
    """The times of every request's tokens."""
    now_s, waiting = 0.0, 0
    tokens: list[list[float]] = [[] for _ in arrivals]
    running: list[int] = []
    while running or waiting < len(arrivals):
        if not running:
            now_s = max(now_s, arrivals[waiting])
        num_new = 0
        while waiting < len(arrivals) and arrivals[waiting] <= now_s:
            running.append(waiting)
            waiting, num_new = waiting + 1, num_new + 1
        step_s = STEP_S + SEQUENCE_S * len(running) + PROMPT_S * num_new
        step_s *= speed * math.exp(rng.gauss(0, noise.step_sd))
        if rng.random() < noise.stalls_per_s * step_s:
            step_s += rng.expovariate(1 / 0.06)
        now_s += step_s
        for request in running:
            tokens[request].append(now_s)
        running = [request for request in running if len(tokens[request]) < NUM_TOKENS]
    return tokens


def _result(
    source: str, arrivals: Sequence[float], tokens: Sequence[Sequence[float]]
) -> LoadedResult:
    pairs = list(zip(arrivals, tokens, strict=True))
    tpot = tuple((times[-1] - times[0]) / (NUM_TOKENS - 1) for _, times in pairs)
    span_s = max(times[-1] for times in tokens)
    return LoadedResult(
        source=source,
        tool="ridgeline",
        samples={
            "ttft": tuple(times[0] - at_s for at_s, times in pairs),
            "tpot": tpot,
            "itl": tpot,
            "e2e": tuple(times[-1] - at_s for at_s, times in pairs),
        },
        figures={
            "output_tok_s": len(pairs) * NUM_TOKENS / span_s,
            "request_rate": len(pairs) / span_s,
        },
        ids=tuple(map(str, range(len(pairs)))),
        load={"num_requests": len(pairs)},
        busy_share=0.0,
    )
