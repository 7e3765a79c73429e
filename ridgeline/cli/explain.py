"""`ridgeline explain MODEL`: every setting as it would be used, and why. Loads no weights."""

from __future__ import annotations

import json as json_lib

from rich.console import Console
from rich.table import Table

from ridgeline.engine.resolve import Resolved, resolve
from ridgeline.settings import Settings


def command(settings: Settings, json: bool = False, console: Console | None = None) -> int:
    """Print what `settings` resolve to; the exit code. Raises UserError where they cannot."""
    resolved = resolve(settings)
    if json:
        print(json_lib.dumps(as_json(resolved)))
    else:
        (console or Console(highlight=False)).print(render(resolved))
    return 0


def as_json(resolved: Resolved) -> dict[str, object]:
    """Values, their derivations, and the techniques applied to the model."""
    return {
        "settings": resolved.values(),
        "derivations": resolved.derivations,
        "rewrites": list(resolved.spec.rewrites),
    }


def render(resolved: Resolved) -> Table:
    """One row per setting, and one per technique applied to the model's spec."""
    table = Table(box=None, pad_edge=False)
    for name, style in (("setting", ""), ("value", "bold"), ("why", "dim")):
        table.add_column(name, style=style)
    for name, value in resolved.values().items():
        table.add_row(name, shown(name, value), resolved.derivations.get(name, ""))
    for rewrite in resolved.spec.rewrites:
        table.add_row("technique", "", rewrite)
    return table


def shown(name: str, value: object) -> str:
    """A value as a person reads it."""
    if value is None:
        return "off"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and name.endswith("_bytes"):
        return f"{value:,} ({value / 2**20:,.1f} MiB)"
    return f"{value:,}" if isinstance(value, int) else str(value)
