"""Rows × GB/s and rows × GOPS of every kind of weight, from the output of `bench_linear.py --json`.

    python benchmarks/draw_linear.py FILE [--output linear.svg]

Two pictures, one above the other. A product of few rows is as fast as its weights are read: dashed,
the read rate of the same run. One of many rows is as fast as the cores multiply: dashed, the peak
of each kind.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ridgeline.report.svg import Scale, element

WIDTH, HEIGHT, MARGIN = 820, 420, 60
COLOURS = ("#357", "#b33", "#283", "#b70", "#637", "#066", "#555", "#8a5", "#39c", "#c6a")
STYLE = "text{font:12px sans-serif;fill:#444}polyline{fill:none;stroke-width:2}"


def curves(results: dict[str, Any], unit: str) -> dict[str, list[tuple[float, float]]]:
    """(rows, figure) by kind and variant."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in results["results"]:
        found.setdefault(f"{row['kind']} {row['isa']}", []).append((row["rows"], row[unit]))
    return found


def limits(results: dict[str, Any], unit: str) -> dict[str, float]:
    """The dashed lines: the read rate, or the peak of each kind."""
    if unit == "gb_s":
        return {"read rate": results["read_gb_s"]}
    return {f"{kind} peak": peak / 1e9 for kind, peak in results["peaks"].items()}


def picture(results: dict[str, Any], unit: str, title: str) -> str:
    """One picture, its labels to the right of where the curves end."""
    found, bounds = curves(results, unit), limits(results, unit)
    rows = [x for curve in found.values() for x, _ in curve]
    values = [y for curve in found.values() for _, y in curve]
    x = Scale(low=min(rows), high=max(rows), start=MARGIN, end=WIDTH - 2.5 * MARGIN, log=True)
    top = max([*values, *bounds.values()])
    y = Scale(low=min(values) / 1.2, high=top * 1.3, start=HEIGHT - MARGIN, end=MARGIN, log=True)
    parts = [element("text", inner=title, x=MARGIN, y=24)]
    parts += [
        element("text", inner=f"{at}", x=x(at), y=HEIGHT - MARGIN + 18) for at in sorted(set(rows))
    ]
    parts += [element("text", inner=f"{at:g}", x=8, y=y(at)) for at in y.ticks()]
    for at, (name, curve) in enumerate(found.items()):
        parts += drawn(name, curve, COLOURS[at % len(COLOURS)], x, y, 16 * at)
    for name, value in bounds.items():
        across = f"{x(min(rows)):.0f},{y(value):.1f} {x(max(rows)):.0f},{y(value):.1f}"
        parts.append(element("polyline", points=across, stroke="#999", stroke_dasharray="4 4"))
        parts.append(element("text", inner=name, x=MARGIN + 4, y=y(value) - 3))
    return "".join(parts)


def drawn(
    name: str, curve: list[tuple[float, float]], colour: str, x: Scale, y: Scale, down: int
) -> list[str]:
    """One curve, its dots, and its name in the column of labels."""
    points = " ".join(f"{x(rows):.1f},{y(value):.1f}" for rows, value in curve)
    dots = [element("circle", cx=x(rows), cy=y(v), r=3, fill=colour) for rows, v in curve]
    label_y = MARGIN + 10 + down
    key = element("circle", cx=WIDTH - 2.2 * MARGIN, cy=label_y - 4, r=4, fill=colour)
    label = element("text", inner=name, x=WIDTH - 2.2 * MARGIN + 10, y=label_y)
    return [element("polyline", points=points, stroke=colour), *dots, key, label]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("measured", type=Path)
    parser.add_argument("--output", type=Path, default=Path("linear.svg"))
    asked = parser.parse_args()
    results = json.loads(asked.measured.read_text(encoding="utf-8"))
    upper = picture(results, "gb_s", "GB/s of weights over rows")
    lower = picture(results, "gops", "10^9 operations/s over rows")
    moved = element("g", inner=lower, transform=f"translate(0,{HEIGHT})")
    box = f"0 0 {WIDTH} {2 * HEIGHT}"
    inner = element("style", inner=STYLE) + element("g", inner=upper) + moved
    svg = element("svg", inner=inner, xmlns="http://www.w3.org/2000/svg", viewBox=box)
    asked.output.write_text(svg, encoding="utf-8")
    print(asked.output)


if __name__ == "__main__":
    main()
