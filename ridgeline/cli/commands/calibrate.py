"""`ridgeline calibrate`: measure how fast this machine or a server is, for later predictions."""

from __future__ import annotations

from ridgeline.cli.params.fetch_model import fetch_model
from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.planning import CalibrateOptions
from ridgeline.errors import BadInput


def calibrate(call: Invocation) -> None:
    """`ridgeline calibrate`."""
    options = call.read(CalibrateOptions)
    if (options.engine is None) == (options.url is None):
        raise BadInput("calibrate needs either --engine MODEL or --url URL", value=options.engine)
    if options.url is not None:
        _calibrate_server(options, options.url)
    elif options.engine is not None:
        _calibrate_engine(options, fetch_model(options.engine))


def _calibrate_engine(options: CalibrateOptions, model: str) -> None:
    from rich.console import Console

    from ridgeline.cli.render.calibrate import engine_calibration_table
    from ridgeline.cli.render.live_progress import live_progress
    from ridgeline.report.files import write_file
    from ridgeline.report.json_line import json_line
    from ridgeline.workflows.calibrate.calibrate_engine import calibrate_engine
    from ridgeline.workflows.calibrate.step_passes import calibration_runs

    runs = calibration_runs(model, options.quantization, options.also)
    with live_progress() as observer:
        result = calibrate_engine(runs, options.budget, observer)
    write_file(options.output, [result.to_json().encode()])
    if options.json:
        print(json_line(result.to_dict()))
    else:
        Console(highlight=False).print(engine_calibration_table(result, options.output))


def _calibrate_server(options: CalibrateOptions, url: str) -> None:
    from rich.console import Console

    from ridgeline.cli.render.calibrate import server_calibration_table
    from ridgeline.cli.render.live_progress import live_progress
    from ridgeline.report.files import write_file
    from ridgeline.report.json_line import json_line
    from ridgeline.workflows.calibrate.calibrate_server import calibrate_server
    from ridgeline.workflows.targets import RemoteServer

    server = RemoteServer(url=url, model=options.served_model_name, api_key=options.api_key)
    with live_progress() as observer:
        result = calibrate_server(server, options.budget, observer)
    write_file(options.output, [result.to_json().encode()])
    if options.json:
        print(json_line(result.to_dict()))
    else:
        Console(highlight=False).print(server_calibration_table(result, options.output))
