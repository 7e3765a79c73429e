"""`ridgeline diagnose`: what limits latency, and what would improve it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console

from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.console import ReportConsole
from ridgeline.cli.render.live_progress import live_progress
from ridgeline.cli.render.measure.diagnose import print_diagnosis, print_nsight, print_profile
from ridgeline.config.load import BenchOptions, DiagnoseOptions
from ridgeline.config.settings import Settings
from ridgeline.report.files import write_file
from ridgeline.report.json_line import json_line
from ridgeline.report.result import Result
from ridgeline.workflows.diagnose.diagnose import diagnose as make_diagnosis
from ridgeline.workflows.diagnose.diagnose import diagnosis_source, reference_device
from ridgeline.workflows.diagnose.nsight_export import diagnose_nsight
from ridgeline.workflows.diagnose.operator_profile import profile_operators
from ridgeline.workflows.targets import Target

R = TypeVar("R", bound=Result)


def diagnose(call: Invocation) -> None:
    """`ridgeline diagnose`: an engine here, a server, a recorded run, or a profiler's export."""
    given, settings = call.read(DiagnoseOptions), call.read(Settings)
    if given.nsight is not None:
        run_nsight(given.nsight, given)
        return
    options = msgspec.structs.replace(call.read(BenchOptions), seed=settings.seed)
    if given.profile:
        run_profile(options, call.settings(given.model), given)
    else:
        run_diagnose(options, diagnosis_source(given, call.engine_settings), given)


def run_diagnose(
    options: BenchOptions,
    source: Target | Path,
    given: DiagnoseOptions,
    console: Console | None = None,
) -> None:
    """Diagnose, print and write. Raises UserError if no request was served."""
    reference = reference_device(given)
    with live_progress() as observer:
        diagnosis = make_diagnosis(
            options, source, baseline=given.baseline, reference=reference, observer=observer
        )
    _show(diagnosis, print_diagnosis, given, console)


def run_profile(
    options: BenchOptions,
    settings: Settings,
    given: DiagnoseOptions,
    console: Console | None = None,
) -> None:
    """Profile the operators of the engine's steps, print and write."""
    with live_progress() as observer:
        profile = profile_operators(options, settings, observer)
    _show(profile, print_profile, given, console)


def run_nsight(path: Path, given: DiagnoseOptions, console: Console | None = None) -> None:
    """Diagnose an export of NVIDIA's profilers and print the result."""
    _show(diagnose_nsight(path), print_nsight, given, console)


def _show(
    result: R,
    render: Callable[[R, Console], object],
    given: DiagnoseOptions,
    console: Console | None,
) -> None:
    if given.html is not None:  # before printing, which a closed pipe ends
        write_file(given.html, [result.to_html().encode()])
    if given.json:
        print(json_line(result.to_dict()))
    else:
        render(result, console or ReportConsole(soft_wrap=True))
