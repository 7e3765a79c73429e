"""How well `optimize` repairs planted faults of other servers, on twins on a virtual clock.

    PYTHONPATH=. python benchmarks/bench_handicaps.py [NAME…] [--output FILE]

Twenty servers with one or two planted faults (tests/handicaps/handicaps.py). For each: the fault
found, true goodput relative to the best configuration known, and what random search, a sweep of one
rung at a time, and the ladder without forecasts reach with as many trials.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import msgspec

from tests.handicaps.handicaps import HANDICAPS
from tests.handicaps.suite import Outcome, judge, search, summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    outcomes: list[Outcome] = []
    for handicap in HANDICAPS:
        if given.names and handicap.name not in given.names:
            continue
        began_s = time.perf_counter()
        outcome = judge(handicap, *search(handicap, given.seed))
        outcomes.append(outcome)
        took_s = time.perf_counter() - began_s
        print(
            f"{outcome.name:30} {outcome.start:6.2f} -> {outcome.final:6.2f} of "
            f"{outcome.best_known:6.2f}  found at {outcome.found_at}  trials {outcome.num_trials}  "
            f"random {outcome.random:5.2f} sweep {outcome.sweep:5.2f} in order "
            f"{outcome.in_order:5.2f}  [{took_s:.0f} s]  {outcome.kept} "
            f"false {outcome.false_keeps}",
            flush=True,
        )
        if given.output is not None:
            rows = [{**msgspec.to_builtins(o), "regained": round(o.regained, 3)} for o in outcomes]
            document = {"seed": given.seed, "summary": summary(outcomes), "handicaps": rows}
            given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(summary(outcomes))


if __name__ == "__main__":
    main()
