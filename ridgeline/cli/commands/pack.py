"""`ridgeline pack`: several models on a stock of devices."""

from __future__ import annotations

from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.planning import PackOptions


def pack(call: Invocation) -> None:
    """`ridgeline pack`."""
    from rich.console import Console

    from ridgeline.cli.render.planning.pack import pack_table
    from ridgeline.report.json_line import json_line
    from ridgeline.workflows.planning.pack import pack as place_models

    options = call.read(PackOptions)
    result = place_models(options.models, options.accelerator, catalogue=options.catalogue)
    if options.json:
        print(json_line(result.to_dict()))
    else:
        Console(highlight=False).print(pack_table(result))
