"""`ridgeline explain topics`: everything that has an explanation."""

from __future__ import annotations

from rich.table import Table

from ridgeline.workflows.explain.topics import REGISTRY, topics


def listed() -> dict[str, list[str]]:
    """Ids by kind."""
    return {kind: sorted(set(topics(kind).names().values())) for kind in REGISTRY}


def render() -> Table:
    """One row per kind."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for kind, ids in listed().items():
        table.add_row(kind, ", ".join(ids))
    return table
