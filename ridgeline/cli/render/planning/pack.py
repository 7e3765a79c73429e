"""The table of `ridgeline pack`."""

from __future__ import annotations

from rich.table import Table

from ridgeline.workflows.planning.pack import PackResult


def pack_table(result: PackResult) -> Table:
    """One row per device used."""
    packing = result.packing
    table = Table(box=None, pad_edge=False, title_justify="left")
    table.title = (
        f"{len(packing.shelves)} devices (no packing takes fewer than {packing.least_devices})"
    )
    for name in ("device", "memory GB", "of GB", "busy", "models"):
        table.add_column(name, justify="left" if name in ("device", "models") else "right")
    for shelf in sorted(packing.shelves, key=lambda shelf: (shelf.device, -shelf.memory_bytes)):
        models = ", ".join(f"{p.model} ({p.memory_bytes / 1e9:.1f} GB)" for p in shelf.pieces)
        table.add_row(
            shelf.device,
            f"{shelf.memory_bytes / 1e9:.1f}",
            f"{shelf.usable_bytes / 1e9:.1f}",
            f"{shelf.busy:.0%}",
            models,
        )
    return table
