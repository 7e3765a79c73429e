"""`ridgeline pack`: several models onto a stock of devices."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ridgeline.report.json_line import json_line

if TYPE_CHECKING:
    from ridgeline.hardware.catalogue import Accelerator
    from ridgeline.plan.fleet.packing import Packing, Tenant

MOST_DEVICES = 10_000


def pack(
    models: Annotated[
        Path, typer.Argument(help="TOML of [[model]] rows: model, rate, isl, osl, weight_dtype.")
    ],
    device: Annotated[
        str, typer.Option(help="What there is: h100-sxm=2,l4=4 (names of the catalogue).")
    ],
    catalogue: Annotated[
        Path | None,
        typer.Option(help="A catalogue of accelerators instead of ours (TOML).", metavar="FILE"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Put several models onto devices of different memory: who shares with whom."""
    from ridgeline.plan.fleet.packing import pack as place
    from ridgeline.workflows.planning.predict import read_catalogue

    rows = read_catalogue(catalogue)
    found = place(_tenants(models), stock(device, rows), rows)
    if json:
        print(json_line(found))
    else:
        _print(found)


def _tenants(path: Path) -> list[Tenant]:
    from ridgeline.errors import BadInput
    from ridgeline.plan.fleet.packing import Tenant

    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        found = msgspec.convert(document.get("model", []), list[Tenant])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise BadInput("cannot read the models", value=str(path), fix=str(error)) from None
    if not found:
        raise BadInput("there is no model to place", value=str(path), fix="write [[model]] rows")
    return found


def stock(text: str, rows: dict[str, Accelerator]) -> dict[str, int]:
    """`h100-sxm=2,l4=4`; a name alone is one device."""
    from ridgeline.errors import BadInput
    from ridgeline.hardware.catalogue import find_accelerator

    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, count = part.partition("=")
        if not (count or "1").isdigit() or int(count or 1) < 1:
            raise BadInput("--device needs names and counts", value=part, limit="h100-sxm=2,l4=4")
        full = find_accelerator(name, rows).name
        found[full] = found.get(full, 0) + int(count or 1)
    if sum(found.values()) > MOST_DEVICES:
        raise BadInput("--device names too many", value=text, limit=f"{MOST_DEVICES} in all")
    return found


def _print(found: Packing) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title_justify="left")
    table.title = (
        f"{len(found.shelves)} devices (no packing takes fewer than {found.least_devices})"
    )
    for name in ("device", "memory GB", "of GB", "busy", "models"):
        table.add_column(name, justify="left" if name in ("device", "models") else "right")
    for shelf in sorted(found.shelves, key=lambda shelf: (shelf.device, -shelf.memory_bytes)):
        models = ", ".join(f"{p.model} ({p.memory_bytes / 1e9:.1f} GB)" for p in shelf.pieces)
        table.add_row(
            shelf.device,
            f"{shelf.memory_bytes / 1e9:.1f}",
            f"{shelf.usable_bytes / 1e9:.1f}",
            f"{shelf.busy:.0%}",
            models,
        )
    Console(highlight=False).print(table)
