"""`ridgeline watch`: whether a tuned server's traffic has drifted, and what would gain now."""

from __future__ import annotations

from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.load import WatchOptions

DRIFTED = 1


def watch_command(call: Invocation) -> int:
    """`ridgeline watch`; 1 if the traffic has drifted."""

    from ridgeline.cli.render.console import ReportConsole
    from ridgeline.cli.render.improve.advice import print_watch
    from ridgeline.cli.render.live_progress import live_progress
    from ridgeline.report.json_line import json_line
    from ridgeline.workflows.optimize.watch import watch
    from ridgeline.workflows.optimize.watch_cronjob import cronjob

    options = call.read(WatchOptions)
    if options.cronjob:
        print(cronjob(options), end="")
        return 0
    with live_progress() as observer:
        report = watch(options, observer=observer)
    if options.json:
        print(json_line(report.to_dict()))
    else:
        print_watch(ReportConsole(), report)
    return DRIFTED if report.drifted else 0
