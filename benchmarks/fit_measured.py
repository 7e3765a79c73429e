"""Fits what `--operators measured` adds to measured operators, and says how wrong it is.

    python benchmarks/fit_measured.py POINTS.csv --fit     print the rows of `[measured]`
    python benchmarks/fit_measured.py POINTS.csv --output FILE     errors next to the analytic ones

Needs `pip install 'ridgeline[silicon]'`. Points, division, priors and loss are those of
efficiency_fit.py. A part of a step takes the weighted mean, in logarithms, of its measured and its
analytic time, because both err: the tables are of other releases than the published runs and time
kernels alone, the analytic model knows no kernels. The weight and the engines' overheads are
fitted, the analytic shares stay as they are. For models that are left out, both fits are repeated
without them.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import UserError

if __package__:
    from benchmarks.efficiency_fit import (
        SHARED,
        Prior,
        campaign_weights,
        engine_seconds,
        features,
        fit_parameters,
        fit_values,
        part_seconds,
        priors,
        tpot,
    )
    from benchmarks.published_points import Row, loop_steps, machine_of, quantile, read
else:
    from efficiency_fit import (
        SHARED,
        Prior,
        campaign_weights,
        engine_seconds,
        features,
        fit_parameters,
        fit_values,
        part_seconds,
        priors,
        tpot,
    )
    from published_points import Row, loop_steps, machine_of, quantile, read

PARTS = ("products", "experts", "head", "decode", "prompt", "collectives")
"""The parts that tables have, in the order of `MeasuredParts`."""
REFITTED = ("latent_layer_s", "host")
WEIGHT = Prior(0.5, 0.7, 1.0)


def measured_seconds(rows: Sequence[Row]) -> dict[str, NDArray[Any]]:
    """By step: seconds of `PARTS` of all points, nan where a shape was not measured."""
    found: dict[str, list[Any]] = {"decode": [], "mixed": []}
    known: dict[Any, Any] = {}
    for row in rows:
        machine = machine_of(row.point, measured=True)
        steps = loop_steps(row.point, machine)
        for name, groups in (("decode", steps.decode), ("mixed", steps.mixed)):
            key = (msgspec.structs.replace(row.point, isl=1, osl=1, batch=1), groups, steps.batch)
            if key not in known:
                assert machine.operators is not None
                known[key] = machine.operators.parts(groups, steps.batch)
            found[name].append([np.nan if s is None else s for s in known[key]])
    return {name: np.array(values, float).T for name, values in found.items()}


def blended_tpot(
    value: Mapping[str, float],
    analytic: Mapping[str, float],
    data: Mapping[str, Any],
    measured: Mapping[str, NDArray[Any]],
) -> NDArray[Any]:
    """Seconds per token with measured operators; `analytic`: the values of the analytic fit."""
    merged = {**analytic, **value}

    def steps(value: Mapping[str, float], data: Mapping[str, Any], step: str) -> NDArray[Any]:
        parts = part_seconds(value, data, step)
        for name, seconds in zip(PARTS, measured[step], strict=True):
            both = (parts[name] > 0) & (seconds > 0)  # neither absent nor unknown
            weight = np.where(both, value["measured_weight"], 0.0)
            ratio = np.where(both, seconds, 1.0) / np.where(both, parts[name], 1.0)
            parts[name] = parts[name] * ratio**weight
        return sum(parts.values(), start=engine_seconds(value, data, step))

    return tpot(merged, data, steps)


def fit_measured(
    analytic: Mapping[str, float],
    data: Mapping[str, Any],
    measured: Mapping[str, NDArray[Any]],
    tpot_s: NDArray[Any],
    weight: NDArray[Any],
) -> dict[str, float]:
    """The weight of measured times and the overheads next to them."""
    known = {name: prior for name, prior in priors().items() if name not in SHARED}
    known |= {name: SHARED[name] for name in REFITTED} | {"measured_weight": WEIGHT}
    return fit_parameters(
        known,
        lambda value: np.log(blended_tpot(value, analytic, data, measured) / tpot_s),
        weight,
    )


def figures(name: str, error: NDArray[Any], weight: NDArray[Any]) -> list[Any]:
    texts = [f"{quantile(abs(error), weight, share):.1%}" for share in (0.5, 0.9)]
    texts.append(f"{quantile(error, weight, 0.5):+.1%}")
    return [name, len(error), *(text.replace("%", " %") for text in texts)]


def result(rows: Sequence[Row], *, print_values: bool) -> dict[str, Any]:
    """The record of benchmarks/results."""
    data, measured, weight = features(rows), measured_seconds(rows), campaign_weights(rows)
    tpot_s, once = np.array([row.tpot_s for row in rows]), np.array([row.weight for row in rows])
    kept, pool = np.array([row.kept for row in rows]), np.array(data["pool"])
    models = np.array([row.point.model for row in rows])
    errors = {way: np.zeros(len(rows)) for way in ("analytic", "measured")}
    left_out = {way: np.zeros(len(rows)) for way in errors}
    start = None
    for model in (None, *sorted(set(models))):
        unseen = kept if model is None else models == model
        seen = np.where(unseen, 0.0, weight)
        values = fit_values(data, tpot_s, seen, start)
        start = start or values
        added = fit_measured(values, data, measured, tpot_s, seen)
        into = errors if model is None else left_out
        into["analytic"][unseen] = (tpot(values, data) / tpot_s - 1)[unseen]
        blended = blended_tpot(added, values, data, measured)
        into["measured"][unseen] = (blended / tpot_s - 1)[unseen]
        if model is None and print_values:
            for name in (*added, *SHARED):
                print(f"{name} = {(added if name in added else values)[name]:.3g}")
    table = []
    for way, error in errors.items():
        for name, chosen in (("", kept), (", aggregated", kept & ~pool)):
            table.append(figures(way + name, error[chosen], once[chosen]))
    for way, error in left_out.items():
        for name, chosen in (("", pool | ~pool), (", aggregated", ~pool)):
            name = f"{way}, models left out{name}"
            table.append(figures(name, error[chosen], once[chosen]))
    return {
        "machine": "H100, H200 and B200 (measured by others, 2025-10 to 2026-04)",
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/fit_measured.py POINTS.csv --output FILE",
        "note": "TPOT of the points that were kept from both fits, and of models without which "
        "both were repeated; aiconfigurator-core 0.12.0.",
        "columns": ["operators", "points", "median error", "90 %", "bias"],
        "rows": table,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("points", type=Path)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    found = result(read(chosen.points), print_values=chosen.fit)
    for line in found["rows"]:
        print(*line)
    if chosen.output is not None:
        text = json.dumps(found, indent=2, ensure_ascii=False)
        chosen.output.write_text(f"{text}\n")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(str(error)) from None
