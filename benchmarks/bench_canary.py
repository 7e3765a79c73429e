"""Simulated rollouts: how often an equal version is rolled back, and a worse one caught.

    python benchmarks/bench_canary.py [--rollouts 1000] [--planted 200] [--seed 0] [--output FILE]
    python benchmarks/bench_canary.py --needed [--planted 400]

Every rollout runs the gateway's `Rollout` from the shadow to its verdict, with the defaults of
`ridgeline route`: compared answers of 16 to 256 tokens, then sessions of one request. A session's
times vary by 30 % (log-normal), errors and missed SLOs happen at the given rates on both sides.
`tokens` and `sessions` are what the canary needed until its verdict. `--needed` prints, for rates
of errors (or missed SLOs) of the two versions, the `--canary-min-sessions` with which nine of ten
rollouts are rolled back for them (null: none up to 10,000), and how many sessions all servers have
answered at its end.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import msgspec
import numpy as np

from ridgeline.fleet.canary.evidence import EventEvidence
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


RATES = (
    *((0.0, 0.01), (0.0, 0.005), (0.01, 0.02), (0.02, 0.04), (0.02, 0.03)),
    *((0.05, 0.10), (0.05, 0.07), (0.20, 0.25)),
)
"""Of errors, or missed SLOs: the old version's and the canary's."""
SESSIONS = (100, 150, 200, 300, 400, 500, 700, 1000, 1500, 2000, 3000, 4000, 5000, 7000, 10_000)


def is_caught(rng: np.random.Generator, old: float, new: float, min_sessions: int) -> bool:
    """Whether the bad sessions of a rollout, in random order, are evidence against the canary."""
    config, evidence = RolloutConfig(), EventEvidence()
    for share in config.stages:
        num_old = int(rng.negative_binomial(min_sessions, share))
        bad = [rng.binomial(min_sessions, new), rng.binomial(num_old, old)]
        for is_canary in rng.permutation(np.repeat((True, False), bad)):
            evidence.note(bool(is_canary), share)
            if evidence.log_evidence >= config.log_needed:
                return True
    return False


def needed(old: float, new: float, count: int, seed: int) -> dict[str, float | None]:
    """The least number of sessions that suffices, and all servers' until then; None if none of
    `SESSIONS` does."""
    row: dict[str, float | None] = {"old": old, "new": new, "min_sessions": None}
    for min_sessions in SESSIONS:
        caught = sum(
            is_caught(np.random.default_rng((seed, number)), old, new, min_sessions)
            for number in range(count)
        )
        row |= {"caught": caught, "all": None}
        if caught >= 0.9 * count:
            total = round(sum(min_sessions / share for share in RolloutConfig().stages))
            return row | {"min_sessions": min_sessions, "all": total}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--planted", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--needed", action="store_true")
    args = parser.parse_args()
    if args.needed:
        for old, new in RATES:
            print(json.dumps(needed(old, new, args.planted, args.seed)), flush=True)
        return
    rows = [measure(canary, args.rollouts, args.seed) for canary in EQUAL]
    rows += [measure(canary, args.planted, args.seed) for canary in PLANTED]
    if args.output is not None:
        args.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
