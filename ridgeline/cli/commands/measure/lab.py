"""`ridgeline lab`: experiments that measure one technique after another."""

from __future__ import annotations

from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.load import LabOptions

NOTHING_RAN, INTERRUPTED = 2, 130


def lab(call: Invocation) -> int:
    """`ridgeline lab casestudy`; 2 if no stage can run here, 130 if it was interrupted."""
    from ridgeline.cli.render.console import ReportConsole
    from ridgeline.cli.render.live_progress import live_progress
    from ridgeline.cli.render.measure.case_study import print_case_study
    from ridgeline.report.json_line import json_line
    from ridgeline.workflows.lab.run_case_study import run_case_study

    options = call.read(LabOptions)
    with live_progress() as observer:
        study = run_case_study(options, observer)
    if options.output_json is not None:
        study.save(options.output_json)
    if options.html is not None:
        study.save(options.html)
    if options.json:
        print(json_line(study.to_dict()))
    else:
        print_case_study(study, ReportConsole())
    if study.interrupted:
        return INTERRUPTED
    return 0 if study.first is not None else NOTHING_RAN
