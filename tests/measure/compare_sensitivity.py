"""How often `compare` is wrong, and how often it finds a slowdown, on generated runs.

`python -m tests.measure.compare_sensitivity PAIRS` prints two tables: with one run per side, for
runs that differ otherwise than is assumed; and with several runs of a server in virtual time. Each
says how many of PAIRS pairs without a change are called regressed, and in how many a slowdown of
10 % is found. By hand; figures are in docs/concepts/measurements.md.
"""

from __future__ import annotations

import sys

from tests.measure.simulated_run import Noise, simulated_runs
from tests.measure.test_compare_noise import conclusion, generated_run

CASES = [
    (0.012, 0.0),
    (0.012, 0.7),
    (0.012, 0.85),
    (0.0, 0.7),
    (0.025, 0.7),
    (0.05, 0.7),
]
"""(Standard deviation from run to run, correlation from request to request)."""

NOISES = {
    "1.2%, no stalls": Noise(stalls_per_s=0.0),
    "1.2%": Noise(),
    "2.5%": Noise(run_sd=0.025),
    "4%": Noise(run_sd=0.04),
}
"""Standard deviation of the machine's speed from run to run, with or without stalls of 60 ms."""


def regressed(pairs: int, run_sd: float, correlation: float, slower: float) -> int:
    """How many pairs are called regressed."""
    count = 0
    for seed in range(0, 2 * pairs, 2):
        a = generated_run(seed, run_sd=run_sd, correlation=correlation)
        b = generated_run(seed + 1, run_sd=run_sd, correlation=correlation, slower=slower)
        count += conclusion([a], [b]) == "regressed"
    return count


def repeated(pairs: int, num_runs: int, noise: Noise, slower: float) -> int:
    """How many pairs of repeated runs are called regressed."""
    return sum(
        conclusion(
            simulated_runs(f"{pair}/a", num_runs, noise=noise),
            simulated_runs(f"{pair}/b", num_runs, noise=noise, slower=slower),
        )
        == "regressed"
        for pair in range(pairs)
    )


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    print_single_runs(pairs)
    print(f"\n| from run to run | runs a side | alarms in {pairs} | 10 % found |")
    print("|---|---|---|---|")
    for name, noise in NOISES.items():
        for num_runs in (4, 6, 8):
            alarms, found = (repeated(pairs, num_runs, noise, slower) for slower in (0.0, 0.1))
            print(f"| {name} | {num_runs} | {alarms} | {found} |", flush=True)


def print_single_runs(pairs: int) -> None:
    print(f"| from run to run | from request to request | alarms in {pairs} | 10 % found |")
    print("|---|---|---|---|")
    for run_sd, correlation in CASES:
        alarms = regressed(pairs, run_sd, correlation, 1.0)
        found = regressed(pairs, run_sd, correlation, 1.1)
        print(f"| {run_sd:.1%} | {correlation:g} | {alarms} | {found} |", flush=True)


if __name__ == "__main__":
    main()
