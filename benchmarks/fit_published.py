"""Fits `efficiency.toml` to published operating points, and says how wrong `predict` is on them.

    python benchmarks/fit_published.py POINTS.csv            errors of the present table
    python benchmarks/fit_published.py POINTS.csv --fit      fit on four fifths, print the values
    python benchmarks/fit_published.py POINTS.csv --intervals     and the 80 % interval of each

The points are those of published_points.py, the fit that of efficiency_fit.py.
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ridgeline.errors import UserError
from ridgeline.plan.step_time.predict import predict

if __package__:
    from benchmarks.efficiency_fit import (
        campaign_weights,
        check_sums,
        efficiency_from,
        features,
        first_token_data,
        fit_first_token,
        fit_values,
        parameter_intervals,
        tpot,
        ttft,
    )
    from benchmarks.published_points import Row, predict_with, read, roomy, summary
else:
    from efficiency_fit import (
        campaign_weights,
        check_sums,
        efficiency_from,
        features,
        first_token_data,
        fit_first_token,
        fit_values,
        parameter_intervals,
        tpot,
        ttft,
    )
    from published_points import Row, predict_with, read, roomy, summary


def errors(rows: Sequence[Row]) -> None:
    """Print the errors of the present table, over all points and by group."""
    tpot, ttft, refused = {}, {}, collections.Counter[str]()
    inside: dict[str, list[bool]] = {"tpot_ms": [], "ttft_ms": []}
    for index, row in enumerate(rows):
        try:
            found = predict(row.point, roomy())
        except UserError as error:
            refused[str(error)[:110]] += 1
            continue
        if row.kept:
            measured = {"tpot_ms": row.tpot_s * 1000, "ttft_ms": row.ttft_s * 1000}
            for name, held in inside.items():
                low, high = found.interval[name]
                held.append(low <= measured[name] <= high)
        tpot[index] = found.tpot_ms / 1000 / row.tpot_s - 1
        ttft[index] = found.ttft_ms / 1000 / row.ttft_s - 1
    print(f"{len(tpot)} of {len(rows)} points answered")
    for name, held in inside.items():
        print(f"80 % interval of {name} covers {np.mean(held):.0%} of the kept points")
    for reason, count in refused.most_common(8):
        print(f"  refused {count}: {reason}")
    sets = {
        "all": lambda row: True,
        "kept": lambda row: row.kept,
        "kept, aggregated": lambda row: row.kept and row.point.decode is None,
        "kept, disaggregated": lambda row: row.kept and row.point.decode is not None,
    }
    for name in sorted({row.group for row in rows}):
        sets[" ".join(name)] = lambda row, name=name: row.group == name
    for name, chosen in sets.items():
        for what, found_errors in (("TPOT", tpot), ("TTFT", ttft)):
            picked = [(e, rows[i].weight) for i, e in found_errors.items() if chosen(rows[i])]
            if picked:
                print(f"{what} {name:48s} {summary(picked)}")


def fit(rows: Sequence[Row]) -> None:
    """Print the values of a fit to the points that are not kept, and its error on the others."""
    data, measured = features(rows), np.array([row.tpot_s for row in rows])
    weight = np.where([row.kept for row in rows], 0.0, campaign_weights(rows))
    values = fit_values(data, measured, weight)
    check_sums(values, data, rows)
    for name, value in values.items():
        print(f"{name} = {value:.3g}")
    found = tpot(values, data) / measured - 1
    kept = [(e, row.weight) for e, row in zip(found, rows, strict=True) if row.kept]
    print("TPOT of kept points:", summary(kept))
    predictions = [
        predict_with(efficiency_from(values, row.point.device, row.point.backend), row.point)
        for row in rows
    ]
    first, waited = first_token_data(rows, predictions), np.array([row.ttft_s for row in rows])
    part = np.array([0.0 if row.kept else row.weight for row in rows])
    values = fit_first_token(first, waited, part)
    for name, value in values.items():
        print(f"{name} = {value:.3g}")
    found = ttft(values, first) / waited - 1
    kept = [(e, row.weight) for e, row in zip(found, rows, strict=True) if row.kept]
    print("TTFT of kept points:", summary(kept))


def intervals(rows: Sequence[Row]) -> None:
    """Print the rows of `[interval]`: of fits to campaigns that are drawn with replacement."""
    data, measured = features(rows), np.array([row.tpot_s for row in rows])
    weight = np.where([row.kept for row in rows], 0.0, campaign_weights(rows))
    values = fit_values(data, measured, weight)
    found = parameter_intervals(rows, data, measured, weight, values)
    for name, (low, high) in found.items():
        print(f'"{name}" = [{low:.3g}, {high:.3g}]')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("points", type=Path)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--intervals", action="store_true")
    chosen = parser.parse_args()
    rows = read(chosen.points)
    if chosen.fit:
        fit(rows)
    elif chosen.intervals:
        intervals(rows)
    else:
        errors(rows)


if __name__ == "__main__":
    main()
