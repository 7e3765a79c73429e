"""`ridgeline alerts`: alerting rules for Prometheus."""

from __future__ import annotations

import msgspec

from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.tools import AlertsOptions
from ridgeline.report.json_line import json_line
from ridgeline.workflows.write_alerts import write_alerts


def alerts(call: Invocation) -> None:
    """`ridgeline alerts`."""
    options = call.read(AlertsOptions)
    rules = write_alerts(options)
    if options.json:
        print(json_line(msgspec.to_builtins(rules)))
    else:
        print(rules.to_yaml(), end="")
