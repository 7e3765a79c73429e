"""`ridgeline explain MODEL`: every setting as it would be used, and why; then every technique of
the ladder, and why it is or is not for this model on this machine. Loads no weights.
"""

from __future__ import annotations

import json as json_lib

import msgspec
from rich.console import Console
from rich.table import Table

from ridgeline.cli.lab import Numbers
from ridgeline.cli.recommend import Here, Recommendation, recommendations
from ridgeline.engine.resolve import Resolved, resolve
from ridgeline.hardware.probe import probe
from ridgeline.settings import Settings


def command(settings: Settings, json: bool = False, console: Console | None = None) -> int:
    """Print what `settings` resolve to; the exit code. Raises UserError where they cannot."""
    resolved = resolve(settings)
    told = techniques(settings)
    if json:
        print(json_lib.dumps({**as_json(resolved), "techniques": msgspec.to_builtins(told)}))
        return 0
    out = console or Console(highlight=False)
    out.print(render(resolved))
    out.print()
    out.print(render_techniques(told))
    return 0


def techniques(settings: Settings) -> list[Recommendation]:
    """Every rung of the ladder, judged by arithmetic against this machine's probe."""
    numbers = Numbers(probe())

    def price(chosen: Settings) -> Here:
        resolved = numbers.resolved(chosen)
        return Here(values=resolved.values(), spec=resolved.spec, ceilings=numbers.ceilings(chosen))

    return list(recommendations(settings, price))


def render_techniques(told: list[Recommendation]) -> Table:
    """One row per technique: what it would do here, and when it hurts."""
    table = Table(box=None, pad_edge=False)
    for name, style in (("technique", ""), ("here", "bold"), ("why", "dim")):
        table.add_column(name, style=style)
    for each in told:
        table.add_row(each.title, each.verdict, f"{each.reason}. Hurts when: {each.hurts_when}")
    return table


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
