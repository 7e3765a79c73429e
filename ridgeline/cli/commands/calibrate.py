"""`ridgeline calibrate`: measure how fast this machine or a server is, for later predictions."""

from __future__ import annotations

from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.planning import CalibrateOptions


def calibrate(call: Invocation) -> None:
    """`ridgeline calibrate`."""
    from ridgeline.cli.render.calibrate import calibration_table
    from ridgeline.cli.render.console import ReportConsole
    from ridgeline.cli.render.live_progress import live_progress
    from ridgeline.report.files import write_file
    from ridgeline.report.json_line import json_line
    from ridgeline.workflows.calibrate.calibrate import calibrate as calibrate_target

    options = call.read(CalibrateOptions)
    with live_progress() as observer:
        result = calibrate_target(options, observer)
    write_file(options.output, [result.to_json().encode()])
    if options.json:
        print(json_line(result.to_dict()))
    else:
        ReportConsole().print(calibration_table(result, options.output))
