"""`ridgeline explain`: the settings of a model, or a topic."""

from __future__ import annotations

from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.rules import refuse
from ridgeline.config.tools import ExplainOptions


def explain(call: Invocation) -> int:
    """`ridgeline explain`."""
    options = call.read(ExplainOptions)
    if options.subject == "speculation":
        only = {
            "--workload": options.workload,
            "--slo": options.slo,
            "--request-rate": options.request_rate,
        }
        refuse([flag for flag, value in only.items() if value], "on explain speculation")
        from ridgeline.workflows.explain.explain_speculation import command as speculation

        return speculation(call.settings(options.model), options.json)
    from ridgeline.workflows.explain.explain import Asked, command, is_model, subject_command

    asked = Asked(workload=options.workload, slo=options.slo, request_rate=options.request_rate)
    if options.subject is None or is_model(options.subject):
        refuse([options.model] if options.model else [], "after a model")
        return command(call.settings(options.subject), asked, options.json)
    return subject_command(options.subject, call.settings(options.model), asked, options.json)
