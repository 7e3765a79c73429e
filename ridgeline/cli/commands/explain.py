"""`ridgeline explain`: the settings of a model, a topic, or speculative decoding."""

from __future__ import annotations

from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.tools import ExplainOptions


def explain(call: Invocation) -> None:
    """`ridgeline explain`."""
    from ridgeline.cli.render.console import ReportConsole
    from ridgeline.cli.render.explain import explanation_json, print_explanation
    from ridgeline.cli.render.live_progress import live_progress
    from ridgeline.report.json_line import json_line
    from ridgeline.workflows.explain.explain_subject import explain as explain_subject

    options = call.read(ExplainOptions)
    with live_progress() as observer:
        explanation = explain_subject(options, call.settings, observer)
    if options.json:
        print(json_line(explanation_json(explanation)))
    else:
        print_explanation(explanation, ReportConsole())
