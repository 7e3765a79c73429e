"""How well `optimize` repairs planted faults of other servers, on twins on a virtual clock.

    PYTHONPATH=. python benchmarks/bench_handicaps.py --baselines   # after a change of the twin
    PYTHONPATH=. python benchmarks/bench_handicaps.py [NAME…] [--untuned] [--output FILE]

Twenty servers with one or two planted faults (tests/handicaps/handicaps.py), or with `--untuned`
the eight that no rule of the search was tuned on. For each: the fault found, true goodput relative
to the best configuration known, and what random search, a sweep of one rung at a time, and the
ladder without forecasts reach with six trials.

What does not depend on the search (the best configuration, the other searches) is stored in
tests/handicaps/baselines.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.handicaps.handicaps import HANDICAPS, UNTUNED
from tests.handicaps.suite import (
    BASELINES,
    Outcome,
    baseline_of,
    judge,
    make_baseline,
    search,
    stored_baselines,
    summary,
)

COLUMNS = [
    "server and fault",
    "start",
    "after the search",
    "best known",
    "fault repaired by trial",
    "trials",
    "random",
    "sweep",
    "in order",
]
ALL = (*HANDICAPS, *UNTUNED)
NOTE = (
    "Requests/s within the SLO by the twin's own model: 10 s runs without noise, knee within 4 %, "
    "mean of three sequences of arrivals, so differences of a few percent say nothing. The search "
    "measures with noise, in 1,200 virtual seconds; its step times are off by 15 % at a batch of "
    "64. Best known: greedy ascents by true goodput from the start and from the server's defaults. "
    "The last three columns are what six trials reach with exact measurements of one sequence: "
    "random walks of up to three rungs (mean of two), every rung once on the start and the gains "
    "joined, and the ladder's order without forecasts; all of them, and the best known, may use "
    "lossy rungs where the gate would pass them."
)


def table(outcomes: Sequence[Outcome], arguments: str) -> dict[str, Any]:
    """The document of benchmarks/results. `arguments`: of the command."""
    rows = [
        [
            o.name,
            o.start,
            {"value": o.final, "bold": o.regained >= 0.95},
            o.best_known,
            "none" if o.found_at is None else str(o.found_at),
            o.num_trials,
            o.random,
            o.sweep,
            o.in_order,
        ]
        for o in outcomes
    ]
    figures = summary(outcomes)
    names = ("start", "regained", "random", "sweep", "in_order")
    start, regained, *others = [f"{figures[f'mean_{name}']:.0%}" for name in names]
    found = f"{figures['found']} of {figures['handicaps']}"
    trials = round(figures["mean_trials"], 1)
    rows.append(["mean share of the best known", start, regained, "100%", found, trials, *others])
    return {
        "machine": "virtual time; the figures do not depend on the machine",
        "date": datetime.date.today().isoformat(),
        "command": f"PYTHONPATH=. python benchmarks/bench_handicaps.py{arguments}",
        "note": NOTE,
        "columns": COLUMNS,
        "decimals": [None, 2, 2, 2, None, None, 2, 2, 2],
        "rows": rows,
    }


def store_baselines(names: Sequence[str]) -> None:
    """Compute the baselines of the handicaps of these names (none: of all), and store them."""
    known = stored_baselines() if BASELINES.exists() else {}
    for handicap in ALL:
        if not names or handicap.name in names:
            known[handicap.name] = row = make_baseline(handicap)
            print(row, flush=True)
            rows = [known[h.name] for h in ALL if h.name in known]
            text = msgspec.json.format(msgspec.json.encode(rows), indent=1)
            BASELINES.write_bytes(text + b"\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--untuned", action="store_true", help="the eight of no tuning")
    parser.add_argument("--baselines", action="store_true", help="compute and store the baselines")
    given = parser.parse_args()
    if given.baselines:
        store_baselines(given.names)
        return
    outcomes: list[Outcome] = []
    for handicap in UNTUNED if given.untuned else ALL if given.names else HANDICAPS:
        if given.names and handicap.name not in given.names:
            continue
        began_s = time.process_time()
        outcome = judge(handicap, *search(handicap, given.seed), baseline_of(handicap))
        outcomes.append(outcome)
        took_s = time.process_time() - began_s
        print(
            f"{outcome.name:30} {outcome.start:6.2f} -> {outcome.final:6.2f} of "
            f"{outcome.best_known:6.2f}  found at {outcome.found_at}  trials {outcome.num_trials}  "
            f"random {outcome.random:5.2f} sweep {outcome.sweep:5.2f} in order "
            f"{outcome.in_order:5.2f}  [{took_s:.0f} s]  {outcome.kept} "
            f"false {outcome.false_keeps}",
            flush=True,
        )
        if given.output is not None:
            given.output.write_text(
                json.dumps(table(outcomes, " --untuned" * given.untuned), indent=1) + "\n",
                encoding="utf-8",
            )
    print(summary(outcomes))


if __name__ == "__main__":
    main()
