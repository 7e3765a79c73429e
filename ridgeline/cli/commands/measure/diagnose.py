"""`ridgeline diagnose`: what latency is lost to, and what gives it back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.load import BenchOptions, DiagnoseOptions
from ridgeline.config.rules import refuse
from ridgeline.config.settings import Settings
from ridgeline.report.files import write_file
from ridgeline.report.json_line import json_line

if TYPE_CHECKING:
    from rich.console import Console

    from ridgeline.workflows.diagnose.diagnose import ReferenceDevice
    from ridgeline.workflows.targets import Target


def diagnose(call: Invocation) -> int:
    """`ridgeline diagnose`: an engine here, a server, a recorded run, or a profiler's export."""
    from ridgeline.workflows.diagnose.diagnose import ReferenceDevice
    from ridgeline.workflows.targets import RemoteServer

    given, settings = call.read(DiagnoseOptions), call.read(Settings)
    if given.nsight is not None:
        return run_nsight(given.nsight, given.json)
    here = given.run is None and given.url is None
    idle_model = given.model and not here and not given.accelerator
    refuse(["MODEL"] if idle_model else [], "without --accelerator")
    options = msgspec.structs.replace(call.read(BenchOptions), seed=settings.seed)
    outputs = DiagnoseOutputs(html=given.html, json=given.json)
    if given.profile:
        return run_profile(options, call.settings(given.model), outputs)
    reference = None
    if given.accelerator is not None:
        reference = ReferenceDevice(model=given.model, accelerator=given.accelerator)
    source: Target | Path
    if given.run is not None:
        source = given.run
    elif given.url is not None:
        source = RemoteServer(url=given.url, model=given.served_model_name, api_key=given.api_key)
    else:
        source = call.settings(given.model)
    return run_diagnose(options, source, outputs, baseline=given.baseline, reference=reference)


class DiagnoseOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """A page to write, and whether to print JSON."""

    html: Path | None = None
    json: bool = False


def run_diagnose(
    options: BenchOptions,
    source: Target | Path,
    outputs: DiagnoseOutputs,
    *,
    baseline: Path | None = None,
    reference: ReferenceDevice | None = None,
    console: Console | None = None,
) -> int:
    """Diagnose, print and write; the exit code. Raises UserError if no request was served."""
    from rich.console import Console

    from ridgeline.cli.render.diagnose import print_diagnosis
    from ridgeline.cli.render.live_progress import live_progress
    from ridgeline.workflows.diagnose.diagnose import diagnose as make_diagnosis

    with live_progress() as observer:
        diagnosis = make_diagnosis(
            options, source, baseline=baseline, reference=reference, observer=observer
        )
    if outputs.json:
        print(json_line(diagnosis.to_dict()))
    else:
        print_diagnosis(diagnosis, console or Console(highlight=False, soft_wrap=True))
    if outputs.html is not None:
        write_file(outputs.html, [diagnosis.to_html().encode()])
    return 0


def run_profile(
    options: BenchOptions,
    settings: Settings,
    outputs: DiagnoseOutputs,
    console: Console | None = None,
) -> int:
    """Profile, print and write; the exit code."""
    from rich.console import Console

    from ridgeline.cli.render.diagnose import print_profile
    from ridgeline.cli.render.live_progress import live_progress
    from ridgeline.workflows.diagnose.operator_profile import profile_operators

    with live_progress() as observer:
        result = profile_operators(options, settings, observer)
    if outputs.json:
        print(json_line(result.to_dict()))
    else:
        print_profile(result, console or Console(highlight=False, soft_wrap=True))
    if outputs.html is not None:
        write_file(outputs.html, [result.to_html().encode()])
    return 0


def run_nsight(path: Path, as_json: bool, console: Console | None = None) -> int:
    """Diagnose an export of NVIDIA's profilers and print it; the exit code."""
    from rich.console import Console

    from ridgeline.cli.render.diagnose import print_nsight
    from ridgeline.workflows.diagnose.nsight_export import diagnose_nsight

    result = diagnose_nsight(path)
    if as_json:
        print(json_line(result.to_dict()))
    else:
        print_nsight(result, console or Console(highlight=False, soft_wrap=True))
    return 0
