"""A text plot of the Pareto front: tok/s per user against tok/s per device, with the SLO."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ridgeline.plan.fleet.search import Candidate

WIDTH, HEIGHT = 64, 16


def draw_front(front: Sequence[Candidate], tpot_s: float | None) -> str:
    """Plot the front on logarithmic axes; empty for fewer than two candidates.

    `*`: a candidate that meets the SLO; `o`: one that does not; `|`: the SLO's speed per user.
    """
    if len(front) < 2:
        return ""
    xs = [math.log10(candidate.tok_s_user) for candidate in front]
    ys = [math.log10(candidate.tok_s_device) for candidate in front]
    corner = None if tpot_s is None else math.log10(1 / tpot_s)
    low_x = min([*xs, *([corner] if corner is not None else [])])
    high_x = max([*xs, *([corner] if corner is not None else [])])
    rows = [[" "] * (WIDTH + 1) for _ in range(HEIGHT + 1)]
    if corner is not None:
        for row in rows:
            row[_place(corner, low_x, high_x, WIDTH)] = "|"
    for candidate, x, y in zip(front, xs, ys, strict=True):
        mark = "*" if candidate.holds else "o"
        rows[HEIGHT - _place(y, min(ys), max(ys), HEIGHT)][_place(x, low_x, high_x, WIDTH)] = mark
    return _framed(rows, (low_x, high_x), (min(ys), max(ys)))


def _place(value: float, low: float, high: float, size: int) -> int:
    return round((value - low) / ((high - low) or 1.0) * size)


def _framed(rows: Sequence[Sequence[str]], x: tuple[float, float], y: tuple[float, float]) -> str:
    labels = {0: f"{10 ** y[1]:,.0f}", len(rows) - 1: f"{10 ** y[0]:,.0f}"}
    lines = ["tok/s per device"]
    lines += [f"{labels.get(i, ''):>10} {''.join(row)}".rstrip() for i, row in enumerate(rows)]
    left, right = f"{10 ** x[0]:,.0f}", f"{10 ** x[1]:,.0f} tok/s per user"
    lines.append(" " * 11 + left + right.rjust(WIDTH + 1 - len(left)))
    return "\n".join(lines)
