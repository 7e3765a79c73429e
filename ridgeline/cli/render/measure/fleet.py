"""A fleet as a table: its backends, and what its gateway counted."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ridgeline.workflows.serving.watch_fleet import FleetView


def fleet_screen(view: FleetView | None, url: str) -> Group:
    """The fleet's table under a line of totals; a note while the gateway does not answer."""
    if view is None:
        return Group(Text(f"the gateway at {url} does not answer", style="red"))
    return Group(Text(_totals(view), style="dim"), fleet_table(view))


def fleet_table(view: FleetView) -> Table:
    """One row per backend."""
    table = Table(box=None, pad_edge=False)
    for name in ("server", "state", "version", "models"):
        table.add_column(name, no_wrap=name != "models")
    for name in ("in flight", "queued tokens", "prompt tok/s"):
        table.add_column(name, justify="right")
    for backend in view.backends:
        table.add_row(
            backend.url,
            Text(backend.state, style="green" if backend.state == "ready" else "yellow"),
            backend.arm,
            ", ".join(backend.models),
            str(backend.in_flight),
            f"{backend.queued_tokens:,}",
            f"{backend.prefill_tok_s:,.0f}" if backend.prefill_tok_s else "",
        )
    return table


def _totals(view: FleetView) -> str:
    ready = sum(backend.state == "ready" for backend in view.backends)
    parts = [
        f"{ready} of {len(view.backends)} ready, {view.wanted_replicas} wanted",
        f"{view.num_parked} parked",
        f"oldest {view.oldest_s:.1f} s",
        *(f"{view.counts.get(name, 0):,} {name}" for name in ("requests", "resumed", "lost")),
    ]
    if view.canary:
        parts.append(f"canary {view.canary}")
    return " · ".join(parts)
