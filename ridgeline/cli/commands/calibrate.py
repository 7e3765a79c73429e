"""`ridgeline calibrate`: how fast this machine or a server is, for later predictions."""

from __future__ import annotations

from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.planning import CalibrateOptions
from ridgeline.errors import BadInput


def calibrate(call: Invocation) -> None:
    """`ridgeline calibrate`."""
    options = call.read(CalibrateOptions)
    if (options.engine is None) == (options.url is None):
        raise BadInput("calibrate needs either --engine MODEL or --url URL", value=options.engine)
    if options.url is not None:
        from ridgeline.workflows.calibrate.calibrate_server import Remote
        from ridgeline.workflows.calibrate.calibrate_server import command as calibrate_server

        remote = Remote(url=options.url, model=options.served_model_name, api_key=options.api_key)
        calibrate_server(remote, options.output, options.budget, options.json)
        return
    from ridgeline.workflows.calibrate.calibrate_engine import command
    from ridgeline.workflows.calibrate.step_passes import runs_of

    assert options.engine is not None
    runs = runs_of(options.engine, options.quantization, options.also)
    command(runs, options.output, options.budget, options.json)
