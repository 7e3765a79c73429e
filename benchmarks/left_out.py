"""Says how wrong the fitted step time is on models, devices and engines that the fit has not seen.

    python benchmarks/left_out.py POINTS.csv --output FILE

For each model (then device, then engine) the table of efficiencies is fitted to the points of all
others, and held against its own points. The points are those of fit_published.py, and all of them
take part: nothing else is kept away.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

if __package__:
    from benchmarks.fit_published import Row, features, parameters, quantile, read, tpot, unscaled
else:
    from fit_published import Row, features, parameters, quantile, read, tpot, unscaled

GROUPS: Mapping[str, Callable[[Row], str]] = {
    "model": lambda row: row.point.model,
    "device": lambda row: row.point.device,
    "engine": lambda row: str(row.point.backend),
}


def fitted(
    data: Mapping[str, Any], measured: NDArray[Any], weight: NDArray[Any], start: NDArray[Any]
) -> NDArray[Any]:
    """Logarithms of the parameters; points of weight 0 have no part in them."""
    names, prior, upper = parameters()

    def residuals(logs: NDArray[Any]) -> NDArray[Any]:
        predicted = tpot(dict(zip(names, np.exp(logs), strict=True)), data)
        error = np.log(predicted / measured)
        return np.concatenate([np.sqrt(weight) * error, 0.05 * (logs - prior)])

    return least_squares(
        residuals,
        start,
        bounds=(upper - 12, upper),
        loss="soft_l1",
        f_scale=0.2,
    ).x


def left_out_errors(rows: Sequence[Row]) -> dict[str, tuple[list[str], NDArray[Any]]]:
    """By kind of group: the group of each row, and its error under a fit without that group."""
    data = features(rows)
    unscaled(data, rows)
    names, prior, _ = parameters()
    measured = np.array([row.tpot_s for row in rows])
    weight = np.array([row.weight for row in rows])
    everything = fitted(data, measured, weight, prior)
    by_kind = {}
    for kind, group_of in GROUPS.items():
        groups = [group_of(row) for row in rows]
        errors = np.zeros(len(rows))
        for group in sorted(set(groups)):
            own = np.array([name == group for name in groups])
            logs = fitted(data, measured, np.where(own, 0.0, weight), everything)
            predicted = tpot(dict(zip(names, np.exp(logs), strict=True)), data)
            errors[own] = predicted[own] / measured[own] - 1
        by_kind[kind] = (groups, errors)
    return by_kind


def figures(errors: NDArray[Any], weight: NDArray[Any]) -> list[str]:
    """Median, 90th percentile and bias."""
    cells = [f"{quantile(abs(errors), weight, share):.1%}" for share in (0.5, 0.9)]
    cells.append(f"{quantile(errors, weight, 0.5):+.1%}")
    return [cell.replace("%", " %") for cell in cells]


def result(rows: Sequence[Row]) -> dict[str, Any]:
    """The record of benchmarks/results."""
    weight = np.array([row.weight for row in rows])
    together = np.array([row.point.decode is None for row in rows])
    table: list[list[Any]] = []
    for kind, (groups, errors) in left_out_errors(rows).items():
        for group in sorted(set(groups)):
            own = np.array([name == group for name in groups])
            table.append([kind, group, int(own.sum()), *figures(errors[own], weight[own])])
        table.append([kind, "all", len(rows), *figures(errors, weight)])
        part = figures(errors[together], weight[together])
        table.append([kind, "all, aggregated", int(together.sum()), *part])
    return {
        "machine": "H100, H200 and B200 (measured by others, 2025-10 to 2026-04)",
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/left_out.py POINTS.csv --output FILE",
        "note": "TPOT, all points: the table of efficiencies is fitted again without each group.",
        "columns": ["left out", "group", "points", "median error", "90 %", "bias"],
        "rows": table,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("points", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    chosen = parser.parse_args()
    text = json.dumps(result(read(chosen.points)), indent=2, ensure_ascii=False)
    chosen.output.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
