"""Errors of `predict` on published points by model, device, engine and format, as a table.

    python benchmarks/published_table.py POINTS.csv --output benchmarks/results/published-table.json

Only points that the fit did not see, each operating point once. The roofline next to it has every
part of a step at its data-sheet peak and no overheads: what arithmetic says without a fit.
With `--aiconfigurator FILE`, further columns hold it against AIConfigurator on the points that
aiconfigurator_points.py could estimate.
POINTS.csv is described in fit_published.py; `scripts/render_results.py` puts the table on its page.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from ridgeline.plan.step_time.predict import predict

if __package__:
    from benchmarks.published_points import Row, quantile_of, read, roofline_times, roomy
else:
    from published_points import Row, quantile_of, read, roofline_times, roomy

COLUMNS = [
    *("model", "device", "engine", "weights", "serving", "points"),
    *("TPOT error", "bias", "TTFT error", "roofline's TPOT error", "bias of the roofline"),
]
COMPARED = ["points with both", "AIConfigurator's TPOT error", "its bias", "ours on these"]
Estimates = Mapping[int, float]
"""Row of the file → milliseconds per output token by AIConfigurator."""


def group_of(row: Row) -> tuple[str, ...]:
    point = row.point
    serving = "aggregated" if point.decode is None else "disaggregated"
    return (point.model, point.device, str(point.backend), str(point.weight_dtype), serving)


def read_estimates(path: Path) -> Estimates:
    """The figures of the points that were answered; a refused point has its reason instead."""
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    return {line["row"]: line["tpot_ms"] for line in lines if "tpot_ms" in line}


def compared(rows: Mapping[int, Row], estimates: Estimates) -> list[str | int]:
    """The errors of both on the points that both answer."""
    theirs, ours = [], []
    for number, row in rows.items():
        if number in estimates:
            tpot_ms = predict(row.point, roomy()).tpot_ms
            theirs.append((estimates[number] / 1000 / row.tpot_s - 1, row.weight))
            ours.append((tpot_ms / 1000 / row.tpot_s - 1, row.weight))
    if not theirs:
        return [0, "", "", ""]
    sizes = [quantile_of([(abs(e), w) for e, w in pairs], 0.5) for pairs in (theirs, ours)]
    texts = (f"{sizes[0]:.1%}", f"{quantile_of(theirs, 0.5):+.1%}", f"{sizes[1]:.1%}")
    return [len(theirs), *(text.replace("%", " %") for text in texts)]


def line(name: Sequence[str], rows: Sequence[Row]) -> list[str | int]:
    """Medians over the rows, each weighted by the inverse number of its repetitions."""
    catalogue = roomy()
    errors: dict[str, list[tuple[float, float]]] = {"tpot": [], "ttft": [], "roofline": []}
    for row in rows:
        found = predict(row.point, catalogue)
        errors["tpot"].append((found.tpot_ms / 1000 / row.tpot_s - 1, row.weight))
        errors["ttft"].append((found.ttft_ms / 1000 / row.ttft_s - 1, row.weight))
        errors["roofline"].append((roofline_times(row.point)[1] / row.tpot_s - 1, row.weight))

    def size(which: str) -> str:
        return f"{quantile_of([(abs(e), w) for e, w in errors[which]], 0.5):.1%}"

    def bias(which: str) -> str:
        return f"{quantile_of(errors[which], 0.5):+.1%}"

    figures = [size("tpot"), bias("tpot"), size("ttft"), size("roofline"), bias("roofline")]
    return [*name, len(rows), *(text.replace("%", " %") for text in figures)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("points", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--aiconfigurator", type=Path, help="estimates of the same points")
    chosen = parser.parse_args()
    kept = {number: row for number, row in enumerate(read(chosen.points)) if row.kept}
    estimates = None if chosen.aiconfigurator is None else read_estimates(chosen.aiconfigurator)
    groups: dict[tuple[str, ...], dict[int, Row]] = collections.defaultdict(dict)
    for number, row in kept.items():
        groups[group_of(row)][number] = row
    parts = [(name, groups[name]) for name in sorted(groups)]
    together = {number: row for number, row in kept.items() if row.point.decode is None}
    parts += [(("all", "", "", "", ""), kept), (("", "", "", "", "aggregated"), together)]
    table = [
        line(name, list(rows.values())) + ([] if estimates is None else compared(rows, estimates))
        for name, rows in parts
    ]
    note = (
        f"{len(kept)} of 1,608 points, kept from the fit. Errors are medians of "
        "|predicted / measured - 1|, biases medians of predicted / measured - 1."
    )
    if estimates is not None:
        note += (
            " AIConfigurator 0.12.0 by its own defaults and newest tables, estimated where it has"
            " no measurement; a random part of the points, without those that it refuses."
        )
    result = {
        "machine": "H100, H200 and B200 (measured by others, 2025-10 to 2026-04)",
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/published_table.py POINTS.csv "
        + ("" if estimates is None else "--aiconfigurator ESTIMATES.jsonl ")
        + "--output FILE",
        "note": note,
        "columns": COLUMNS if estimates is None else [*COLUMNS, *COMPARED],
        "rows": table,
    }
    chosen.output.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
