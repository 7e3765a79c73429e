"""Calibrate the planning arithmetic to this machine, or to a server."""

from __future__ import annotations

from ridgeline.config.planning import CalibrateOptions
from ridgeline.errors import BadInput
from ridgeline.hub.download import ensure_downloaded
from ridgeline.records.progress import Observer, silent
from ridgeline.workflows.calibrate.calibration_result import CalibrationResult
from ridgeline.workflows.device_check import check_device
from ridgeline.workflows.targets import RemoteServer


def calibrate(options: CalibrateOptions, observer: Observer = silent) -> CalibrationResult:
    """Measure the engine or the server that the options name, and fit the arithmetic to it.

    Nothing is written: `options.output` is for the caller. Raises UserError.
    """
    if (options.engine is None) == (options.url is None):
        raise BadInput(
            "calibrate needs either a model (--engine) or a server (--url)",
            value=options.engine,
            fix="name one of them",
        )
    if options.url is not None:
        from ridgeline.workflows.calibrate.calibrate_server import calibrate_server

        server = RemoteServer(
            url=options.url,
            model=options.served_model_name,
            api_key=options.api_key,
            tokenizer=options.tokenizer,
        )
        return calibrate_server(server, options.budget, observer)
    # imports torch, which the calibration of a server does not need
    from ridgeline.workflows.calibrate.calibrate_engine import calibrate_engine
    from ridgeline.workflows.calibrate.step_passes import calibration_runs

    assert options.engine is not None
    check_device(options.device)
    ensure_downloaded(options.engine, observer)
    runs = calibration_runs(options.engine, options.quantization, options.also)
    return calibrate_engine(runs, options.budget, observer, options.device)
