"""`ridgeline inspect MODEL`: the model's arithmetic, and whether its quantised layers are sound."""

from __future__ import annotations

from ridgeline.cli.params.fetch_model import fetch_model, names_repository
from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.console import ReportConsole, print_prose
from ridgeline.cli.render.inspect import (
    check_lines,
    inspection_tables,
    kv_comparison_lines,
    rank_lines,
)
from ridgeline.config.tools import InspectOptions
from ridgeline.report.json_line import json_line
from ridgeline.workflows.inspect_model import inspect_model

FAULTY = 1


def inspect(call: Invocation) -> int:
    """`ridgeline inspect`."""
    options = call.read(InspectOptions)
    if options.against is not None or not names_repository(options.model):
        for name in filter(None, (options.model, options.against)):
            fetch_model(name)
    inspection = inspect_model(
        options.model, against=options.against, what_if=options.what_if, layout=options.layout
    )
    if options.json:
        print(json_line(inspection.to_dict()))
    else:
        console = ReportConsole()
        if inspection.what_if is not None:
            console.print(kv_comparison_lines(inspection.what_if))
        elif inspection.layout is not None:
            console.print(rank_lines(inspection.layout))
        else:
            console.print(inspection_tables(inspection))
        for line in check_lines(inspection):
            print_prose(console, line)
    return 0 if inspection.is_sound else FAULTY
