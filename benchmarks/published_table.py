"""Errors of `predict` on published points by model, device, engine and format, as a table.

    python benchmarks/published_table.py POINTS.csv --output benchmarks/results/published-table.json

Only points that the fit did not see, each operating point once. The roofline next to it has every
part of a step at its data-sheet peak and no overheads: what arithmetic says without a fit.
POINTS.csv is described in fit_published.py; `scripts/render_results.py` puts the table on its page.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
from collections.abc import Sequence
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


def group_of(row: Row) -> tuple[str, ...]:
    point = row.point
    serving = "aggregated" if point.decode is None else "disaggregated"
    return (point.model, point.device, str(point.backend), str(point.weight_dtype), serving)


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
    chosen = parser.parse_args()
    rows = read(chosen.points)
    kept = [row for row in rows if row.kept]
    groups = collections.defaultdict(list)
    for row in kept:
        groups[group_of(row)].append(row)
    table = [line(name, groups[name]) for name in sorted(groups)]
    everything = [("all", "", "", "", ""), ("", "", "", "", "aggregated")]
    table.append(line(everything[0], kept))
    table.append(line(everything[1], [row for row in kept if row.point.decode is None]))
    result = {
        "machine": "H100, H200 and B200 (measured by others, 2025-10 to 2026-04)",
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/published_table.py POINTS.csv --output FILE",
        "note": f"{len(kept)} of {len(rows):,} points, kept from the fit. Errors are medians of "
        "|predicted / measured - 1|, biases medians of predicted / measured - 1.",
        "columns": COLUMNS,
        "rows": table,
    }
    chosen.output.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
