"""A roofline with every operator of a step on it, from what `bench_step.py --json FILE` measured.

    python benchmarks/draw_step.py FILE [--output roofline.svg]

Each dot is an operator: its multiply-adds per byte across, what it reached upwards. The roof is the
read rate and the highest peak that were measured in the same run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ridgeline.measure.report.svg import Scale, element

WIDTH, HEIGHT, MARGIN = 760, 420, 60
STYLE = (
    "text{font:12px sans-serif;fill:#444}line{stroke:#999}.roof{stroke:#b33;stroke-width:2}"
    "circle{fill:#357;opacity:.8}"
)


def points(result: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(operator, multiply-adds per byte, multiply-adds per second) of those that multiply."""
    return [
        (row["operator"], row["macs"] / (row["mb"] * 1e6), row["macs"] / (row["ms"] * 1e-3))
        for row in result["operators"]
        if row["macs"] and row["mb"]
    ]


def drawing(result: dict[str, Any]) -> str:
    """The picture of one number of sequences."""
    found = points(result)
    read, peak = result["read_bytes_s"], max(result["peak_macs_s"].values())
    ridge = peak / read
    across = [x for _, x, _ in found]
    low, high = min([*across, ridge]) / 3, max([*across, ridge]) * 3
    x = Scale(low=low, high=high, start=MARGIN, end=WIDTH - MARGIN, log=True)
    floor = min([y for _, _, y in found] + [low * read]) / 2
    y = Scale(low=floor, high=peak * 2, start=HEIGHT - MARGIN, end=MARGIN, log=True)
    parts = [
        element("line", "roof", x1=x(low), y1=y(low * read), x2=x(ridge), y2=y(peak)),
        element("line", "roof", x1=x(ridge), y1=y(peak), x2=x(high), y2=y(peak)),
    ]
    for tick in x.ticks:
        parts.append(element("text", inner=f"{tick:g}", x=x(tick), y=HEIGHT - MARGIN + 18))
    for tick in y.ticks:
        parts.append(element("text", inner=f"{tick * 1e-9:g}", x=8, y=y(tick)))
    for name, at, reached in found:
        parts.append(element("circle", cx=x(at), cy=y(reached), r=5))
        parts.append(element("text", inner=name, x=x(at) + 8, y=y(reached) + 4))
    title = f"{result['sequences']} sequences: 10^9 multiply-adds/s over multiply-adds per byte"
    parts.append(element("text", inner=title, x=MARGIN, y=24))
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("measured", type=Path)
    parser.add_argument("--output", type=Path, default=Path("roofline.svg"))
    asked = parser.parse_args()
    results = json.loads(asked.measured.read_text(encoding="utf-8"))["results"]
    groups = [
        element("g", inner=drawing(result), transform=f"translate(0,{i * HEIGHT})")
        for i, result in enumerate(results)
    ]
    whole = element("style", inner=STYLE) + "".join(groups)
    box = f"0 0 {WIDTH} {HEIGHT * len(results)}"
    svg = element("svg", inner=whole, xmlns="http://www.w3.org/2000/svg", viewBox=box)
    asked.output.write_text(svg, encoding="utf-8")
    print(asked.output)


if __name__ == "__main__":
    main()
