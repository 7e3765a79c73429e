"""A server's figures as a table: one row each, with its trend and whether it meets the SLO.

Shares are drawn on a scale from 0 to 1, other figures on one from 0 to their largest value shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ridgeline.workflows.serving.watch_server import TREND_LENGTH, ServerView

LEVELS = "▁▂▃▄▅▆▇█"


def server_table(view: ServerView) -> Table:
    """One row per figure that the server exports."""
    title = " · ".join(part for part in ("ridgeline top", view.model) if part)
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", style="bold", no_wrap=True)
    if view.trends:
        table.add_column(f"latest {TREND_LENGTH} updates", style="cyan", no_wrap=True)
    table.add_column("", style="dim")
    for name, label, render in _ROWS:
        if name in view.figures:
            values = () if name in _COUNTERS else view.trends.get(name, ())
            trend = [sparkline(values, name)] if view.trends else []
            table.add_row(label, render(view.figures[name]), *trend, _note(name, view))
    return table


KEYS = "q quits · ? explains"
HELP = (
    "TTFT: time to first token. ITL: gap between two tokens of an answer.",
    "Latencies cover the span at their right; speeds the last update.",
    "SLO met or missed: against the limits of the server's first SLO class.",
    "ridgeline explain NAME says what a figure means, for example explain ttft.",
)


def server_screen(view: ServerView, *, show_help: bool = False) -> Group:
    """The table of a live display with its keys, and what the figures mean."""
    lines = [Text(line, style="dim") for line in (*HELP, KEYS) if show_help or line == KEYS]
    return Group(server_table(view), *lines)


def sparkline(values: Sequence[float | None], name: str = "") -> str:
    """A trend as a row of bars; a blank where the value is unknown."""
    values = values[-TREND_LENGTH:]
    known = [value for value in values if value is not None and math.isfinite(value)]
    top = 1.0 if name.endswith("_share") else max(known, default=0.0)
    return "".join(_bar(value, top) for value in values)


def _bar(value: float | None, top: float) -> str:
    if value is None or not math.isfinite(value):
        return " "
    share = value / top if top > 0 else 0.0
    return LEVELS[min(len(LEVELS) - 1, max(0, math.ceil(share * len(LEVELS)) - 1))]


def _note(name: str, view: ServerView) -> Text:
    """The time span that the figure covers, and whether it meets the SLO."""
    note = Text(view.span if name in _WINDOWED else "")
    limit_s = view.slo_limits_s.get(name)
    if limit_s is not None:
        met = view.figures[name] <= limit_s
        word, style = ("met", "green") if met else ("missed", "bold red")
        note.append(f"  SLO {word}", style).append(f" ({_ms(limit_s)})")
    return note


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _price(value: float) -> str:
    return f"{value:,.2f}"


def _speed(value: float) -> str:
    return f"{value:,.0f} tok/s"


_ROWS: Iterable[tuple[str, str, Callable[[float], str]]] = (
    ("running", "requests running", _count),
    ("waiting", "requests waiting", _count),
    ("finished", "requests finished", _count),
    ("output_tok_s", "output", _speed),
    ("prompt_tok_s", "prompts", _speed),
    ("ttft_p50_s", "ttft p50", _ms),
    ("ttft_p95_s", "ttft p95", _ms),
    ("itl_p50_s", "itl p50", _ms),
    ("itl_p95_s", "itl p95", _ms),
    ("e2e_p95_s", "e2e p95", _ms),
    ("fill_share", "slots in use, latest steps", _share),
    ("kv_used_share", "KV blocks in use", _share),
    ("hit_share", "prompt tokens from the cache", _share),
    ("preemptions", "preemptions", _count),
    ("batch_requests_running", "batch requests running", _count),
    ("batch_requests_open", "batch requests open", _count),
    ("batch_tok_s", "batch output", _speed),
    ("cost_per_million", "cost per million tokens", _price),
)
_WINDOWED = {name for name, _, _ in _ROWS if name.endswith("_s") and "_p" in name} | {"hit_share"}
_COUNTERS = {"finished", "preemptions"}
