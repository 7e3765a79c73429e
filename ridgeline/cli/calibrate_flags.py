"""Flags of `ridgeline calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    engine: Annotated[
        str, typer.Option(help="A model for Ridgeline's own engine, larger than the caches.")
    ],
    quantization: Annotated[
        str | None,
        typer.Option(
            help="Its formats, with commas: dense, int8, int4, bf16 (default: 3 of them)."
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option(help="Where to write the calibration.", metavar="FILE")
    ] = Path("calibration.json"),
    budget: Annotated[float, typer.Option(help="Seconds to measure, models' loading apart.")] = 150,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Learn from at most five short runs how fast this machine is; predict and simulate with it."""
    from ridgeline.cli.calibrate import command, runs_of

    command(runs_of(engine, quantization), output, budget, json)
