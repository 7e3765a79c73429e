"""How the two assumptions of `compare` with one run per side decide what it says.

`python -m tests.measure.compare_sensitivity PAIRS` prints, for runs that differ otherwise than is
assumed, how many of PAIRS pairs without a change are called regressed, and in how many a slowdown
of 10 % is found. By hand; figures are in docs/concepts/measurements.md.
"""

from __future__ import annotations

import sys

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


def regressed(pairs: int, run_sd: float, correlation: float, slower: float) -> int:
    """How many pairs are called regressed."""
    count = 0
    for seed in range(0, 2 * pairs, 2):
        a = generated_run(seed, run_sd=run_sd, correlation=correlation)
        b = generated_run(seed + 1, run_sd=run_sd, correlation=correlation, slower=slower)
        count += conclusion([a], [b]) == "regressed"
    return count


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    print(f"| from run to run | from request to request | alarms in {pairs} | 10 % found |")
    print("|---|---|---|---|")
    for run_sd, correlation in CASES:
        alarms = regressed(pairs, run_sd, correlation, 1.0)
        found = regressed(pairs, run_sd, correlation, 1.1)
        print(f"| {run_sd:.1%} | {correlation:g} | {alarms} | {found} |", flush=True)


if __name__ == "__main__":
    main()
