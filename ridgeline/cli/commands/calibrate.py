"""Flags of `ridgeline calibrate`."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    engine: Annotated[
        str | None,
        typer.Option(help="A model for Ridgeline's own engine, larger than the caches."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="A running OpenAI-compatible server, from outside.")
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            help="With --engine: formats with commas: dense, int8, int4, bf16 (default: 3)."
        ),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            help="With --engine: a run of another shape, which makes the fit hold for more of them;"
            " may be repeated.",
            metavar="MODEL=FORMAT",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="With --url: its model (default: the first it lists).")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="With --url: sent as a bearer.")
    ] = None,
    output: Annotated[
        Path, typer.Option(help="Where to write the calibration.", metavar="FILE")
    ] = Path("calibration.json"),
    budget: Annotated[float, typer.Option(help="Seconds to measure, models' loading apart.")] = 300,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Learn from at most five short runs how fast this machine or a server is, to predict with."""
    from ridgeline.errors import BadInput

    if (engine is None) == (url is None):
        raise BadInput("calibrate needs either --engine MODEL or --url URL", value=engine)
    if not 0 < budget < inf:
        raise BadInput("--budget", value=budget, limit="seconds, more than 0")
    if url is not None:
        for flag, given in (("--quantization", quantization), ("--also", also)):
            if given:
                raise BadInput(f"{flag} has no effect with --url", value=given)
        from ridgeline.workflows.calibrate.calibrate_server import Remote
        from ridgeline.workflows.calibrate.calibrate_server import command as from_outside

        remote = Remote(url=url, model=served_model_name, api_key=api_key)
        from_outside(remote, output, budget, json)
        return
    if served_model_name is not None:
        raise BadInput("--served-model-name has no effect without --url", value=served_model_name)
    from ridgeline.workflows.calibrate.calibrate_engine import command
    from ridgeline.workflows.calibrate.step_passes import runs_of

    assert engine is not None
    command(runs_of(engine, quantization, also or ()), output, budget, json)
