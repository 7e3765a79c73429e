"""Diagnose an engine, a server or a recorded run: what latency is lost to, and how to regain it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ridgeline.config.load import BenchOptions, DiagnoseOptions
from ridgeline.config.rules import refuse
from ridgeline.diagnose.losses.expected_steps import learn
from ridgeline.errors import BadInput
from ridgeline.measure.bench_options import check_options
from ridgeline.measure.monitors.server_config import ELSEWHERE
from ridgeline.measure.results.event_log import (
    RunContext,
    context_from_results,
    find_log,
    read_log,
    read_run,
)
from ridgeline.records import RunTrace
from ridgeline.records.progress import Observer, silent
from ridgeline.workflows.diagnose.diagnose_run import Diagnosis, diagnose_run
from ridgeline.workflows.diagnose.roofline_points import run_roofline
from ridgeline.workflows.load.load_session import load_session, run_context
from ridgeline.workflows.load.token_workload import load_for
from ridgeline.workflows.run_async import run_async
from ridgeline.workflows.targets import (
    ModelOnDevice,
    RemoteServer,
    SettingsOf,
    Target,
    model_on_device,
)


class ReferenceDevice(msgspec.Struct, frozen=True, kw_only=True):
    """The hardware of a run measured from outside, to draw its roofline.

    `model`: the model directory or name; None means the one that a Ridgeline server reports.
    `accelerator`: a catalogue name, `4xNAME`, or `here`.
    """

    model: str | None
    accelerator: str


def diagnosis_source(given: DiagnoseOptions, settings_of: SettingsOf) -> Target | Path:
    """The recorded run, the server, or an engine for the model. Raises BadInput."""
    elsewhere = given.run is not None or given.url is not None
    unused_model = given.model is not None and elsewhere and given.accelerator is None
    refuse(["MODEL"] if unused_model else [], "without --accelerator")
    refuse(["--tokenizer"] if given.tokenizer and given.url is None else [], "without --url")
    if given.run is not None:
        return given.run
    if given.url is not None:
        return RemoteServer(
            url=given.url,
            model=given.served_model_name,
            api_key=given.api_key,
            tokenizer=given.tokenizer,
        )
    return settings_of(given.model)


def reference_device(given: DiagnoseOptions) -> ReferenceDevice | None:
    """The hardware to compare with, if the options name it."""
    if given.accelerator is None:
        return None
    return ReferenceDevice(model=given.model, accelerator=given.accelerator)


def diagnose(
    options: BenchOptions,
    source: Target | Path,
    *,
    baseline: Path | None = None,
    reference: ReferenceDevice | None = None,
    observer: Observer = silent,
) -> Diagnosis:
    """Measure an engine or a server under the load of the options, or read a recorded run; diagnose
    it.

    `source`: settings, a server, or the path of a log of `bench` or of its folder. `baseline`: the
    log of an earlier run of the same model on the same machine. Raises UserError, also if no
    request was served.
    """
    expected = learn(read_run(baseline).steps) if baseline is not None else None
    device: ModelOnDevice | None = None
    if isinstance(source, Path):
        run, context = read_recorded_run(source)
    else:
        check_options(options)
        if reference is not None and reference.model is not None:
            _device(reference, None)  # an unknown name must not cost the run
        options = load_for(options, source, observer)
        with load_session(options, source, observer) as session:
            run, observed = run_async(session.run(options))
            device = session.device(run)
        context = run_context(options, observed)
    diagnosis = diagnose_run(run, context, options.slo, expected)
    if diagnosis.losses is None:
        raise BadInput(
            "nothing to diagnose: no request was served",
            value=run.target,
            fix="look at the errors that `ridgeline bench` reports",
        )
    if reference is not None:
        device = _device(reference, run)
    if device is None:
        return diagnosis
    roof = run_roofline(run, context, diagnosis.metrics, device)
    return msgspec.structs.replace(diagnosis, roof=roof)


def read_recorded_run(path: Path) -> tuple[RunTrace, RunContext]:
    """A run and its context from a log, or from the only log in a folder.

    A log without the server's metrics takes those of the result file of `bench` next to it.
    """
    run, context = read_log(find_log(path))
    if context is None and path.is_dir():
        context = context_from_results(path)
    return run, context or RunContext()


def _device(reference: ReferenceDevice, run: RunTrace | None) -> ModelOnDevice:
    """The roofline; with the formats that a Ridgeline server reports, once a run is there."""
    info = None if run is None else run.info
    model = reference.model
    if model is None:
        reported = info is not None and info.device != ELSEWHERE
        model = str(info.settings.get("model", "")) if reported and info is not None else ""
    if not model:
        raise BadInput(
            "--accelerator needs the model that the run is compared with",
            value=reference.accelerator,
            fix="name its directory: ridgeline diagnose MODEL --run … --accelerator …",
        )
    return model_on_device(model, reference.accelerator, info)
