"""Simulated rollouts: how often an equal version is rolled back, and a worse one caught.

    python benchmarks/bench_canary.py [--rollouts 1000] [--planted 200] [--seed 0] [--output FILE]

Every rollout runs the gateway's `Rollout` from the shadow to its verdict, with the defaults of
`ridgeline route`: compared answers of 16 to 256 tokens, then sessions of one request. A session's
times vary by 30 % (log-normal), errors and missed SLOs happen at the given rates on both sides.
`tokens` and `sessions` are what the canary needed until its verdict.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import msgspec
import numpy as np

from ridgeline.fleet.canary.rollout import Outcome, Rollout, RolloutConfig

NOISE = 0.3  # standard deviation of the logarithm of a session's time


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """A version next to the stable one. Rates of errors and missed SLOs hold for both; `flips`:
    probability that one of its tokens differs; `errors`: further ones of the canary."""

    name: str
    error_rate: float = 0.0
    miss_rate: float = 0.0
    flips: float = 0.0
    slowdown: float = 1.0
    errors: float = 0.0


EQUAL = (
    Canary(name="equal"),
    Canary(name="equal, 2 % errors and 5 % missed SLOs", error_rate=0.02, miss_rate=0.05),
    Canary(name="equal, 20 % missed SLOs", miss_rate=0.2),
)
PLANTED = (
    Canary(name="one token in 10,000 differs", flips=1e-4),
    Canary(name="10 % slower", slowdown=1.1),
    Canary(name="1 % errors", errors=0.01),
    Canary(name="1 % errors on top of 2 %", error_rate=0.02, errors=0.01),
)


def roll_out(rng: np.random.Generator, canary: Canary) -> tuple[Rollout, int]:
    """A rollout to its verdict, and the sessions that the canary got."""
    rollout, number, num_sessions = Rollout(RolloutConfig()), 0, 0
    while rollout.state == "shadow":
        num_tokens = int(rng.integers(16, 256))
        rollout.note_comparison(
            num_tokens, int(rng.random() < 1 - (1 - canary.flips) ** num_tokens)
        )
    base = int(rng.integers(1 << 62))
    while rollout.state == "split":
        number += 1
        session = f"{base}-{number}"
        arm = rollout.arm_of(session)
        own = arm == "canary"
        num_sessions += own
        ttft, pace = np.exp(NOISE * rng.standard_normal(2))
        slower = canary.slowdown if own else 1.0
        failed, missed = rng.random(2)
        outcome = Outcome(
            has_failed=bool(failed < canary.error_rate + (canary.errors if own else 0.0)),
            met_slo=bool(missed >= canary.miss_rate),
            ttft_s=0.2 * float(ttft),
            pace_s=0.05 * float(pace) * slower,
        )
        rollout.note_outcome(arm, session, outcome)
    return rollout, num_sessions


def measure(canary: Canary, count: int, seed: int) -> dict[str, object]:
    began_s, rolled_back, reasons = time.process_time(), 0, dict[str, int]()
    tokens, sessions = list[int](), list[int]()
    for number in range(count):
        rollout, num_sessions = roll_out(np.random.default_rng((seed, number)), canary)
        if rollout.state == "rolled-back":
            rolled_back += 1
            tokens.append(rollout.record.num_compared_tokens)
            sessions.append(num_sessions)
            for reason in rollout.record.reasons:
                reasons[reason] = reasons.get(reason, 0) + 1
    row = {
        "version": canary.name,
        "rollouts": count,
        "rolled_back": rolled_back,
        "reasons": reasons,
        "tokens_p50_p95": [round(float(q)) for q in np.quantile(tokens or [0], (0.5, 0.95))],
        "sessions_p50_p95": [round(float(q)) for q in np.quantile(sessions or [0], (0.5, 0.95))],
        "cpu_s": round(time.process_time() - began_s, 1),
    }
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--planted", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    rows = [measure(canary, args.rollouts, args.seed) for canary in EQUAL]
    rows += [measure(canary, args.planted, args.seed) for canary in PLANTED]
    if args.output is not None:
        args.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
