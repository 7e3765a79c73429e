"""Explain what a subject names: a model, a topic, all topics, or speculative decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from ridgeline.config.model_name import EXAMPLE_MODEL
from ridgeline.config.rules import refuse
from ridgeline.config.settings import Settings
from ridgeline.config.tools import ExplainOptions
from ridgeline.records.progress import Observer, silent
from ridgeline.report.result import Result
from ridgeline.workflows.explain.explain import (
    ExplainLoad,
    ModelExplanation,
    TopicExplanation,
    explain_model,
    explain_topic,
    is_model,
)
from ridgeline.workflows.explain.topics import all_topics

if TYPE_CHECKING:
    from ridgeline.workflows.explain.explain_speculation import SpeculationExplanation


class TopicNames(Result, frozen=True, kw_only=True):
    """The names of all topics, by kind."""

    topics: dict[str, list[str]]


Explanation: TypeAlias = "ModelExplanation | TopicExplanation | TopicNames | SpeculationExplanation"


def explain(
    options: ExplainOptions,
    settings_of: Callable[[str], Settings],
    observer: Observer = silent,
) -> Explanation:
    """Explain the subject of the options; without a model, for the built-in example.

    `settings_of`: the engine settings for a model. Raises UserError.
    """
    subject = options.subject
    if subject == "speculation":
        return _speculation(options, settings_of, observer)
    if subject == "topics":
        return TopicNames(topics=all_topics())
    load = ExplainLoad(
        workload=options.workload, slo=options.slo, request_rate=options.request_rate
    )
    if subject is None or is_model(subject):
        refuse([options.model] if options.model else [], "after a model")
        return explain_model(settings_of(subject or EXAMPLE_MODEL), load)
    return explain_topic(subject, settings_of(options.model or EXAMPLE_MODEL), load)


def _speculation(
    options: ExplainOptions, settings_of: Callable[[str], Settings], observer: Observer
) -> SpeculationExplanation:
    unused = {
        "--workload": options.workload,
        "--slo": options.slo,
        "--request-rate": options.request_rate,
    }
    refuse([flag for flag, value in unused.items() if value], "on explain speculation")
    # imports torch, which no other subject needs
    from ridgeline.workflows.explain.explain_speculation import explain_speculation

    return explain_speculation(settings_of(options.model or EXAMPLE_MODEL), observer)
