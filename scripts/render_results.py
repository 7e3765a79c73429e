"""Write the tables of benchmarks/results/*.json into the pages that quote them.

A page holds a pair of markers; what stands between them is generated:

    <!-- result: throttle -->
    <!-- end -->

`python scripts/render_results.py` rewrites every page under docs/ and README.md; with `--check` it
changes nothing and exits with 1 where a page is out of date. A result file holds what was measured
and how it can be measured again:

    {"machine": "…", "date": "2026-11-22", "command": "python benchmarks/…", "note": "…",
     "columns": ["…"], "rows": [["…", 1.5, {"median": 29.6, "runs": [29.3, 29.6, 29.8]}]]}

A cell is a text, a number, null, `{"median", "runs"}`, `{"value", "interval"}` or `{"runs"}`;
`"bold": true` in it marks a target that is met. `"decimals": [null, null, 2]` fixes the decimals of
a column's numbers.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- result: ([a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def number(value: float, decimals: int | None = None) -> str:
    """Thousands separated from 10,000 on; otherwise as it stands in the file."""
    if decimals is not None:
        return f"{value:.{decimals}f}"
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}"
    return f"{value:g}" if abs(value) < 0.01 else str(value)


def cell(value: Any, decimals: int | None = None) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        figure = value.get("median", value.get("value"))
        text = "" if figure is None else number(figure, decimals)
        runs = ", ".join(number(run, decimals) for run in value.get("runs", ()))
        if runs:
            text = f"{text} ({runs})" if text else runs
        if "interval" in value:
            text += f" [{', '.join(number(end, decimals) for end in value['interval'])}]"
        return f"**{text}**" if value.get("bold") else text
    return value if isinstance(value, str) else number(value, decimals)


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table, followed by its machine, date and command."""
    lines = [f"| {' | '.join(result['columns'])} |", "|---" * len(result["columns"]) + "|"]
    decimals = result.get("decimals", [None] * len(result["columns"]))
    for row in result["rows"]:
        cells = [cell(value, places) for value, places in zip(row, decimals, strict=True)]
        lines.append(f"| {' | '.join(cells)} |")
    origin = [result[key] for key in ("machine", "date") if key in result]
    if "command" in result:
        origin.append(f"`{result['command']}`")
    notes = f" {result['note']}" if "note" in result else ""
    return "\n".join([*lines, "", f"<small>{' · '.join(origin)}.{notes}</small>", ""])


def rendered(page: str) -> str:
    """The page with every marked table rendered from its file."""

    def fill(match: re.Match[str]) -> str:
        result = json.loads((RESULTS / f"{match[2]}.json").read_text(encoding="utf-8"))
        return f"{match[1]}\n{table(result)}\n{match[3]}"

    return MARKED.sub(fill, page)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def stale() -> list[Path]:
    """Pages whose tables differ from their result files."""
    return [page for page in pages() if rendered(text := page.read_text(encoding="utf-8")) != text]


def main() -> int:
    outdated = stale()
    for page in outdated:
        print(page.relative_to(ROOT))
        if "--check" not in sys.argv:
            page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")
    return int(bool(outdated) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
