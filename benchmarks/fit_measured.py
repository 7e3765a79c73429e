"""Fits the overheads next to measured operators, and says how wrong `--operators measured` is.

    python benchmarks/fit_measured.py POINTS.csv --fit     print the rows of `[measured]`
    python benchmarks/fit_measured.py POINTS.csv --output FILE     errors next to the analytic ones

Needs `pip install 'ridgeline[silicon]'`. The points and their division are those of
published_points.py. Only overheads are fitted, to points that are not kept: seconds per step, layer
and routed layer by engine, and the factor of decode pools.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from ridgeline.errors import UserError
from ridgeline.hardware.catalogue import find_accelerator
from ridgeline.modelspec.cost.parameters import count_layers
from ridgeline.plan.calibration.published_efficiency import backends, efficiency_of
from ridgeline.plan.step_time.predict import predict

if __package__:
    from benchmarks.published_points import (
        Row,
        loop_steps,
        machine_of,
        quantile_of,
        read,
        roomy,
        summary,
    )
else:
    from published_points import Row, loop_steps, machine_of, quantile_of, read, roomy, summary

BY_ENGINE = {
    "step_s": 5e-4,
    "layer_s": 2e-5,
    "routed_layer_s": 2e-5,
    "latent_layer_s": 2e-5,
    "disaggregated": 0.7,
}
"""Fitted parameters of each engine, and where the fit starts."""


def features(rows: Sequence[Row]) -> dict[str, NDArray[Any]]:
    columns: dict[str, list[Any]] = {name: [] for name in ("decode", "mixed", "chunks", "counts")}
    for row in rows:
        point = row.point
        eff = efficiency_of(find_accelerator(point.device), point.backend)
        machine = machine_of(point, eff, measured=True)
        steps = loop_steps(point, machine)
        for name, groups in (("decode", steps.decode), ("mixed", steps.mixed)):
            cost = machine.grouped(groups, steps.batch)
            columns[name].append(cost.busy_s + cost.communication_s)
        columns["chunks"].append(steps.mixed_share)
        layers = count_layers(machine.spec)
        columns["counts"].append(
            (
                1,
                len(machine.spec.layers),
                sum(n for layer, n in layers.items() if layer.mlp.num_experts),
                sum(n for layer, n in layers.items() if layer.attention.latent is not None),
                eff.run_s * steps.batch,
            )
        )
    return {
        **{name: np.array(values, float) for name, values in columns.items()},
        "engine": np.array([backends().index(str(row.point.backend)) for row in rows]),
        "newer": np.array([row.point.device == "b200" for row in rows]),
        "pool": np.array([row.point.decode is not None for row in rows]),
    }


def tpot(value: Mapping[str, float], data: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    def own(name: str) -> NDArray[Any]:
        return np.array([value[f"{name} {engine}"] for engine in backends()])[data["engine"]]

    names = ("step_s", "layer_s", "routed_layer_s", "latent_layer_s")
    overhead = sum(data["counts"][:, i] * own(name) for i, name in enumerate(names))
    overhead = overhead * np.where(data["newer"], value["host"], 1.0) + data["counts"][:, 4]
    found = data["decode"] + overhead
    found = found + data["chunks"] * np.maximum(data["mixed"] - data["decode"], 0.0)
    return found * np.where(data["pool"], own("disaggregated"), 1.0)


def fit(rows: Sequence[Row]) -> None:
    data = features(rows)
    names = [f"{name} {engine}" for name in BY_ENGINE for engine in backends()] + ["host"]
    start = np.log([v for v in BY_ENGINE.values() for _ in backends()] + [0.8])
    upper = np.log(
        [1.0 if n == "disaggregated" else 30 * v for n, v in BY_ENGINE.items() for _ in backends()]
        + [1.0]
    )
    measured = np.array([row.tpot_s for row in rows])
    weight = np.sqrt([0.0 if row.kept else row.weight for row in rows])

    def residuals(logs: NDArray[Any]) -> NDArray[Any]:
        found = tpot(dict(zip(names, np.exp(logs), strict=True)), data)
        return np.concatenate([weight * np.log(found / measured), 0.05 * (logs - start)])

    bounds = (upper - 12, upper)
    best = least_squares(residuals, start, bounds=bounds, loss="soft_l1", f_scale=0.2).x
    for name, log in zip(names, best, strict=True):
        print(f"{name} = {math.exp(log):.3g}")
    found = tpot(dict(zip(names, np.exp(best), strict=True)), data) / measured - 1
    report("kept, of the fit", rows, found)


PARTS = (("", None), (", aggregated", False), (", disaggregated", True))


def picked(rows: Sequence[Row], errors: Sequence[float], wanted: bool | None) -> list[Any]:
    """(error, weight) of the kept rows; `wanted`: only disaggregated ones, or only others."""
    return [
        (error, row.weight)
        for error, row in zip(errors, rows, strict=True)
        if row.kept and wanted in (None, row.point.decode is not None)
    ]


def report(name: str, rows: Sequence[Row], errors: Sequence[float]) -> None:
    for part, wanted in PARTS:
        print(f"{name}{part}: {summary(picked(rows, errors, wanted))}")


def result(rows: Sequence[Row], errors: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The record of benchmarks/results."""
    table = []
    for name, values in errors.items():
        for part, wanted in PARTS:
            pairs = picked(rows, values, wanted)
            sizes = [(abs(error), weight) for error, weight in pairs]
            figures = [f"{quantile_of(sizes, share):.1%}" for share in (0.5, 0.9)]
            figures.append(f"{quantile_of(pairs, 0.5):+.1%}")
            table.append([name + part, len(pairs), *(f.replace("%", " %") for f in figures)])
    return {
        "machine": "H100, H200 and B200 (measured by others, 2025-10 to 2026-04)",
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/fit_measured.py POINTS.csv --output FILE",
        "note": "TPOT of the points that were kept from both fits; aiconfigurator-core 0.12.0.",
        "columns": ["operators", "points", "median error", "90 %", "bias"],
        "rows": table,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("points", type=Path)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    rows = read(chosen.points)
    if chosen.fit:
        fit(rows)
        return
    kept, catalogue = [row for row in rows if row.kept], roomy()
    errors = {
        name: [
            predict(row.point, catalogue, measured=measured).tpot_ms / 1000 / row.tpot_s - 1
            for row in kept
        ]
        for name, measured in (("analytic", False), ("measured", True))
    }
    for name, values in errors.items():
        report(name, kept, values)
    if chosen.output is not None:
        text = json.dumps(result(kept, errors), indent=2, ensure_ascii=False)
        chosen.output.write_text(f"{text}\n")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(str(error)) from None
