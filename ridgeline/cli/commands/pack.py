"""`ridgeline pack`: several models onto a stock of devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
    from rich.console import Console

    from ridgeline.cli.render.pack import pack_table
    from ridgeline.report.json_line import json_line
    from ridgeline.workflows.planning.pack import pack as place_models

    result = place_models(models, device, catalogue=catalogue)
    if json:
        print(json_line(result.to_dict()))
    else:
        Console(highlight=False).print(pack_table(result))
