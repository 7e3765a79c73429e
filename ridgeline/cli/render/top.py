"""`ridgeline top` for the eye: a row per figure, where it has been, whether the promise is kept.

A share is drawn against the whole, everything else against the highest value in sight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from rich.table import Table
from rich.text import Text

LEVELS = "▁▂▃▄▅▆▇█"
NUM_SHOWN = 40
"""Looks in a trend."""


class Served(msgspec.Struct, frozen=True):
    """What a server says of itself: its model, and what its default class is promised."""

    model: str = ""
    promised_s: Mapping[str, float] = {}  # by name of the figure


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """What is drawn: figures by name, over which `span` they are, and their `trends`."""

    told: Mapping[str, float]
    span: str = ""
    trends: Mapping[str, Sequence[float | None]] = {}
    served: Served = Served()


def table(shown: Shown) -> Table:
    """One row per figure that is known."""
    title = " · ".join(part for part in ("ridgeline top", shown.served.model) if part)
    made = Table(box=None, pad_edge=False, title=title, title_justify="left")
    made.add_column("figure", no_wrap=True)
    made.add_column("value", justify="right", style="bold", no_wrap=True)
    if shown.trends:
        made.add_column(f"latest {NUM_SHOWN} looks", style="cyan", no_wrap=True)
    made.add_column("", style="dim")
    for name, label, render in _ROWS:
        if name in shown.told:
            values = () if name in _ONLY_GROW else shown.trends.get(name, ())
            trend = [spark(values, name)] if shown.trends else []
            made.add_row(label, render(shown.told[name]), *trend, _note(name, shown))
    return made


def spark(values: Sequence[float | None], name: str = "") -> str:
    """A trend as a row of bars; a blank where nothing is known."""
    values = values[-NUM_SHOWN:]
    known = [each for each in values if each is not None and math.isfinite(each)]
    top = 1.0 if name.endswith("_share") else max(known, default=0.0)
    return "".join(_bar(each, top) for each in values)


def _bar(value: float | None, top: float) -> str:
    if value is None or not math.isfinite(value):
        return " "
    share = value / top if top > 0 else 0.0
    return LEVELS[min(len(LEVELS) - 1, max(0, math.ceil(share * len(LEVELS)) - 1))]


def _note(name: str, shown: Shown) -> Text:
    """Over which time a figure is, and whether what was promised is kept."""
    note = Text(shown.span if name in _SPANNED else "")
    limit_s = shown.served.promised_s.get(name)
    if limit_s is not None:
        kept = shown.told[name] <= limit_s
        word, style = ("kept", "green") if kept else ("missed", "bold red")
        note.append(f"  {word}", style).append(f" (promised {_ms(limit_s)})")
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
    ("fill_share", "slots taken, latest steps", _share),
    ("kv_used_share", "KV blocks in use", _share),
    ("hit_share", "prompt tokens from the cache", _share),
    ("preemptions", "preemptions", _count),
    ("batch_lines_running", "batch lines being answered", _count),
    ("batch_lines_open", "batch lines open", _count),
    ("batch_tok_s", "batch lines", _speed),
    ("cost_per_million", "cost per million tokens", _price),
)
_SPANNED = {name for name, _, _ in _ROWS if name.endswith("_s") and "_p" in name} | {"hit_share"}
_ONLY_GROW = {"finished", "preemptions"}
