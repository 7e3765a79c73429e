"""The table of `ridgeline pack`."""

from __future__ import annotations

from rich.table import Table

from ridgeline.plan.fleet.packing import PackedReplica
from ridgeline.workflows.planning.pack import PackResult


def pack_table(result: PackResult) -> Table:
    """One row per device used."""
    packing = result.packing
    table = Table(box=None, pad_edge=False, title_justify="left")
    table.title = (
        f"{len(packing.devices)} devices (no packing takes fewer than {packing.min_devices})"
    )
    for name in ("device", "memory GB", "of GB", "busy", "models"):
        table.add_column(name, justify="left" if name in ("device", "models") else "right")
    for device in sorted(packing.devices, key=lambda device: (device.name, -device.memory_bytes)):
        models = ", ".join(map(_replica_text, device.replicas))
        table.add_row(
            device.name,
            f"{device.memory_bytes / 1e9:.1f}",
            f"{device.usable_bytes / 1e9:.1f}",
            f"{device.busy:.0%}",
            models,
        )
    return table


def _replica_text(part: PackedReplica) -> str:
    """The model, which replica this is a part of if it is split, and the bytes of the part."""
    split = f" tp{part.tp} #{part.number + 1}" if part.tp > 1 else ""
    return f"{part.model}{split} ({part.memory_bytes / 1e9:.1f} GB)"
