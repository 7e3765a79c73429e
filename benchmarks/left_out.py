"""Says how wrong `predict` is on models, devices and engines that its fit has not seen.

    python benchmarks/left_out.py POINTS.csv --output FILE

For each model (then device, then engine) the table of efficiencies is fitted to the points of all
others, and `predict` with that table is held against the group's own points: TPOT, TTFT, and how
many of them lie in the 80 % intervals. An engine without points gets the mean of the others. The
points are those of published_points.py, and all of them take part.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.plan.step_time.predict import Prediction

if __package__:
    from benchmarks.efficiency_fit import (
        campaign_weights,
        efficiency_from,
        features,
        first_token_data,
        fit_first_token,
        fit_values,
        ttft,
    )
    from benchmarks.published_points import Row, predict_with, quantile, read
else:
    from efficiency_fit import (
        campaign_weights,
        efficiency_from,
        features,
        first_token_data,
        fit_first_token,
        fit_values,
        ttft,
    )
    from published_points import Row, predict_with, quantile, read

GROUPS: Mapping[str, Callable[[Row], str]] = {
    "model": lambda row: row.point.model,
    "device": lambda row: row.point.device,
    "engine": lambda row: str(row.point.backend),
}
DENSE = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-32b")


class Found(NamedTuple):
    """Of each point: relative errors of TPOT and TTFT, and whether their intervals hold."""

    tpot: NDArray[Any]
    ttft: NDArray[Any]
    tpot_held: NDArray[Any]
    ttft_held: NDArray[Any]

    def of(self, chosen: NDArray[Any]) -> Found:
        return Found(*(column[chosen] for column in self))


def predictions_by(values: Mapping[str, float], rows: Sequence[Row]) -> list[Prediction]:
    """The predictions of all points by fitted values."""
    known: dict[tuple[str, str], Any] = {}
    found = []
    for row in rows:
        key = (row.point.device, str(row.point.backend))
        if key not in known:
            known[key] = efficiency_from(values, *key)
        found.append(predict_with(known[key], row.point))
    return found


def held_against(
    rows: Sequence[Row], predictions: Sequence[Prediction], waits: NDArray[Any]
) -> Found:
    """`waits`: seconds to the first token that take the place of the predictions' own."""
    measured = np.array([row.tpot_s for row in rows])
    waited = np.array([row.ttft_s for row in rows])
    tpot = np.array([found.tpot_ms / 1000 for found in predictions])
    spread = np.array([found.interval["tpot_ms"][1] / found.tpot_ms for found in predictions])
    waits_spread = np.array([found.interval["ttft_ms"][1] / found.ttft_ms for found in predictions])
    return Found(
        tpot=tpot / measured - 1,
        ttft=waits / waited - 1,
        tpot_held=abs(np.log(tpot / measured)) <= np.log(spread),
        ttft_held=abs(np.log(waits / waited)) <= np.log(waits_spread),
    )


def left_out_errors(rows: Sequence[Row]) -> dict[str, tuple[NDArray[Any], Found]]:
    """By kind of group: the group of each row, and what a fit without that group says of it."""
    data, weight = features(rows), campaign_weights(rows)
    measured = np.array([row.tpot_s for row in rows])
    waited = np.array([row.ttft_s for row in rows])
    repeated = np.array([row.weight for row in rows])
    everything = fit_values(data, measured, weight)
    by_kind = {}
    for kind, group_of in GROUPS.items():
        groups = np.array([group_of(row) for row in rows])
        columns = [np.zeros(len(rows)) for _ in Found._fields]
        for group in sorted(set(groups)):
            own = groups == group
            values = fit_values(data, measured, np.where(own, 0.0, weight), everything)
            predictions = predictions_by(values, rows)
            first = first_token_data(rows, predictions)
            waits = fit_first_token(first, waited, np.where(own, 0.0, repeated))
            found = held_against(rows, predictions, ttft(waits, first))
            for column, part in zip(columns, found, strict=True):
                column[own] = part[own]
        by_kind[kind] = (groups, Found(*columns))
    return by_kind


def percent(value: float, sign: str = "") -> str:
    return f"{value:{sign}.1%}".replace("%", " %")


def figures(found: Found, weight: NDArray[Any]) -> list[str]:
    """Errors and coverage: the columns of the table behind the number of points."""
    return [
        percent(quantile(abs(found.tpot), weight, 0.5)),
        percent(quantile(abs(found.tpot), weight, 0.9)),
        percent(quantile(found.tpot, weight, 0.5), "+"),
        percent(float(np.average(found.tpot_held, weights=weight))),
        percent(quantile(abs(found.ttft), weight, 0.5)),
        percent(quantile(found.ttft, weight, 0.5), "+"),
        percent(float(np.average(found.ttft_held, weights=weight))),
    ]


COLUMNS = [
    *("left out", "group", "points", "TPOT error", "90 %", "bias", "in the 80 % interval"),
    *("TTFT error", "bias of TTFT", "TTFT in the 80 % interval"),
]


def result(rows: Sequence[Row]) -> dict[str, Any]:
    """The record of benchmarks/results."""
    weight = np.array([row.weight for row in rows])
    dense = np.array([row.point.model in DENSE for row in rows])
    together = np.array([row.point.decode is None for row in rows])
    table: list[list[Any]] = []
    for kind, (groups, found) in left_out_errors(rows).items():
        parts = {group: groups == group for group in sorted(set(groups))}
        parts |= {
            "all": np.ones(len(rows), bool),
            "all, aggregated": together,
            "all, dense": dense,
            "all, mixture of experts, aggregated": ~dense & together,
            "all, disaggregated": ~together,
        }
        for name, own in parts.items():
            table.append([kind, name, int(own.sum()), *figures(found.of(own), weight[own])])
    return {
        "machine": "H100, H200 and B200 (measured by others, 2025-10 to 2026-04)",
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/left_out.py POINTS.csv --output FILE",
        "note": "All points: the table of efficiencies is fitted again without each group. Medians "
        "of |predicted / measured - 1| and of predicted / measured - 1. The widths of the "
        "intervals are the table's.",
        "columns": COLUMNS,
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
