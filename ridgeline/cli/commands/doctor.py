"""`ridgeline doctor`: check whether this machine can run Ridgeline, and run it well."""

from __future__ import annotations

from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.console import ReportConsole
from ridgeline.cli.render.doctor import print_readiness
from ridgeline.config.tools import DoctorOptions
from ridgeline.report.json_line import json_line
from ridgeline.workflows.check_machine import check_machine

NOT_READY = 1


def doctor(call: Invocation) -> int:
    """`ridgeline doctor`."""
    options = call.read(DoctorOptions)
    readiness = check_machine(refresh=options.refresh)
    if options.json:
        print(json_line(readiness.to_dict()))
    else:
        print_readiness(readiness, ReportConsole())
    return 0 if readiness.ready else NOT_READY
