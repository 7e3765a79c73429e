"""Whether `plan` would choose well: the best predicted layout against the best measured one.

    python benchmarks/rank_published.py POINTS.csv [--all] [--output FILE]

A case is a model, a system, a workload (tokens in, out) and a limit of TPOT. The candidates are
the measured operating points of that workload: layout, engine, format and batch. Of those whose
predicted TPOT is within the limit, the one with the highest predicted throughput per device is
chosen. The choice is good if its *measured* throughput per device is within 10 % of the best
measured one within the limit, and its measured TPOT exceeds the limit by at most 10 %.

Only aggregated points count: of most disaggregated ones the number of workers, and so of devices,
is not recorded. Without `--all`, only points that the fit did not see are candidates. Models and
systems with fewer than 20 of them are left out, and so are cases with fewer than three candidates
or where all of them are within 10 % of each other.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from ridgeline.errors import UserError
from ridgeline.plan.step_time.operating_point import OperatingPoint
from ridgeline.plan.step_time.predict import predict

if __package__:
    from benchmarks.published_points import Row, machine_of, read, roofline_times, roomy
else:
    from published_points import Row, machine_of, read, roofline_times, roomy

LIMITS_S = (0.010, 0.015, 0.020, 0.030, 0.050, 0.100)
WITHIN = 0.10
MIN_POINTS, MIN_CANDIDATES = 20, 3


@dataclass(frozen=True, slots=True)
class Choice:
    """One operating point: seconds per token, and output tokens per second and device."""

    measured_s: float
    measured_rate: float
    predicted_s: float
    predicted_rate: float


def chosen_by_prediction(candidates: Sequence[Choice], limit_s: float) -> Choice | None:
    """The fastest per device of those that are predicted to be within the limit."""
    within = [candidate for candidate in candidates if candidate.predicted_s <= limit_s]
    return max(within, key=lambda each: each.predicted_rate, default=None)


def regret(candidates: Sequence[Choice], limit_s: float) -> float | None:
    """Share of the best measured throughput that the predicted choice loses.

    1 if it misses the limit, or nothing is predicted to be within it; None if nothing was measured
    to be within it, or any choice would have done.
    """
    measured = [
        candidate.measured_rate for candidate in candidates if candidate.measured_s <= limit_s
    ]
    if not measured:
        return None
    best = max(measured)
    if all(lost(candidate, best, limit_s) <= WITHIN for candidate in candidates):
        return None
    choice = chosen_by_prediction(candidates, limit_s)
    return 1.0 if choice is None else lost(choice, best, limit_s)


def lost(choice: Choice, best: float, limit_s: float) -> float:
    """Share of `best` that a choice loses; 1 if it misses the limit by more than `WITHIN`."""
    if choice.measured_s > limit_s * (1 + WITHIN):
        return 1.0
    return max(0.0, 1 - choice.measured_rate / best)


Regrets = dict[tuple[str, str], list[float]]
"""(model, device) → the regret of every case."""
Times = Callable[[OperatingPoint], tuple[float, float]]
"""(TTFT, TPOT) in seconds of a point."""


def predicted(point: OperatingPoint) -> tuple[float, float]:
    found = predict(point, CATALOGUE)
    return found.ttft_ms / 1000, found.tpot_ms / 1000


CATALOGUE = roomy()


def choices(rows: Sequence[Row], times: Times) -> Iterator[tuple[tuple[str, ...], Choice]]:
    """(model, device, workload) and choice of each operating point, the median of its repeats."""
    repeats = collections.defaultdict(list)
    for row in rows:
        repeats[row.point].append(row)
    for point, same in repeats.items():
        try:
            ttft_s, tpot_s = times(point)
            devices = machine_of(point).layout.num_devices
        except UserError:
            continue
        measured_s = median(row.tpot_s for row in same)
        first_s = median(row.ttft_s for row in same)

        def rate(first_s: float, token_s: float, point=point, devices=devices) -> float:
            return point.batch * point.osl / (first_s + (point.osl - 1) * token_s) / devices

        case = (point.model, point.device, f"{point.isl}x{point.osl}")
        yield (
            case,
            Choice(measured_s, rate(first_s, measured_s), tpot_s, rate(ttft_s, tpot_s)),
        )


def judge(rows: Sequence[Row], times: Times) -> Regrets:
    """The regrets of every model and system, over workloads and limits."""
    by_case = collections.defaultdict(list)
    for case, choice in choices(rows, times):
        by_case[case].append(choice)
    points = collections.Counter()
    for (model, device, _), found in by_case.items():
        points[model, device] += len(found)
    regrets = collections.defaultdict(list)
    for (model, device, _), found in sorted(by_case.items()):
        if points[model, device] < MIN_POINTS or len(found) < MIN_CANDIDATES:
            continue
        for limit_s in LIMITS_S:
            lost_share = regret(found, limit_s)
            if lost_share is not None:
                regrets[model, device].append(lost_share)
    return regrets


def report(name: str, regrets: Regrets) -> None:
    good = [value <= WITHIN for values in regrets.values() for value in values]
    if not good:
        print(f"{name}: no case")
        return
    print(f"{name}: {mean(good):.0%} of {len(good)} cases within {WITHIN:.0%} of the best measured")
    for (model, device), values in regrets.items():
        hits = sum(value <= WITHIN for value in values)
        line = f"  {model:18s} {device:10s} {hits:3d} of {len(values):3d}"
        print(f"{line}, mean loss {mean(values):.0%}")


COLUMNS = [
    *("model", "device", "cases", "good choices of `predict`", "mean loss"),
    *("good choices of the roofline", "its mean loss"),
]


def result(rows: Sequence[Row], ours: Regrets, roofline: Regrets) -> dict[str, object]:
    """The record of benchmarks/results."""

    def line(name: Sequence[str], mine: Sequence[float], theirs: Sequence[float]) -> list[object]:
        figures = []
        for values in (mine, theirs):
            figures += [f"{mean(v <= WITHIN for v in values):.0%}", f"{mean(values):.0%}"]
        return [*name, len(mine), *(figure.replace("%", " %") for figure in figures)]

    table = [line(name, values, roofline[name]) for name, values in ours.items()]
    table.append(line(("all", ""), flat(ours), flat(roofline)))
    return {
        "machine": "H100, H200 and B200 (measured by others, 2025-10 to 2026-04)",
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/rank_published.py POINTS.csv --output FILE",
        "note": f"{len(rows)} aggregated points, kept from the fit; models and systems with at "
        f"least {MIN_POINTS} of them. A choice that misses the limit counts as a loss of 100 %. "
        "Aim: 80 % of good choices.",
        "columns": COLUMNS,
        "rows": table,
    }


def flat(regrets: Regrets) -> list[float]:
    return [value for values in regrets.values() for value in values]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("points", type=Path)
    parser.add_argument("--all", action="store_true", help="also points that the fit has seen")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    rows = [row for row in read(chosen.points) if row.point.decode is None]
    if not chosen.all:
        rows = [row for row in rows if row.kept]
    ours, roofline = judge(rows, predicted), judge(rows, roofline_times)
    report("predict", ours)
    report("untuned roofline", roofline)
    if chosen.output is not None:
        text = json.dumps(result(rows, ours, roofline), indent=2, ensure_ascii=False)
        chosen.output.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
