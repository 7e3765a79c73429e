"""`ridgeline explain`: the settings of a model, a topic, or speculative decoding."""

from __future__ import annotations

from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.model_name import EXAMPLE_MODEL
from ridgeline.config.rules import refuse
from ridgeline.config.tools import ExplainOptions


def explain(call: Invocation) -> None:
    """`ridgeline explain`."""
    options = call.read(ExplainOptions)
    if options.subject == "speculation":
        _explain_speculation(call, options)
    elif options.subject == "topics":
        _list_topics(options.json)
    else:
        _explain_subject(call, options)


def _explain_speculation(call: Invocation, options: ExplainOptions) -> None:
    unused = {
        "--workload": options.workload,
        "--slo": options.slo,
        "--request-rate": options.request_rate,
    }
    refuse([flag for flag, value in unused.items() if value], "on explain speculation")
    from rich.console import Console

    from ridgeline.cli.render.explain import print_speculation
    from ridgeline.cli.render.live_progress import live_progress
    from ridgeline.report.json_line import json_line
    from ridgeline.workflows.explain.explain_speculation import explain_speculation

    with live_progress() as observer:
        explanation = explain_speculation(call.settings(options.model or EXAMPLE_MODEL), observer)
    if options.json:
        print(json_line(explanation.cases))
    else:
        print_speculation(explanation, Console(highlight=False))


def _list_topics(as_json: bool) -> None:
    from rich.console import Console

    from ridgeline.cli.render.explain import topics_table
    from ridgeline.report.json_line import json_line
    from ridgeline.workflows.explain.topics import all_topics

    if as_json:
        print(json_line(all_topics()))
    else:
        Console(highlight=False).print(topics_table(all_topics()))


def _explain_subject(call: Invocation, options: ExplainOptions) -> None:
    from rich.console import Console

    from ridgeline.cli.render.explain import print_model_explanation, print_topic_explanation
    from ridgeline.report.json_line import json_line
    from ridgeline.workflows.explain.explain import (
        ExplainLoad,
        explain_model,
        explain_topic,
        is_model,
    )

    load = ExplainLoad(
        workload=options.workload, slo=options.slo, request_rate=options.request_rate
    )
    out, subject = Console(highlight=False), options.subject
    if subject is None or is_model(subject):
        refuse([options.model] if options.model else [], "after a model")
        explanation = explain_model(call.settings(subject or EXAMPLE_MODEL), load)
        if options.json:
            print(json_line(explanation.to_dict()))
        else:
            print_model_explanation(explanation, out)
        return
    topic = explain_topic(subject, call.settings(options.model or EXAMPLE_MODEL), load)
    if options.json:
        print(json_line(topic.pages))
    else:
        print_topic_explanation(topic, out)
