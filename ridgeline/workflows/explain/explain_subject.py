"""Explain what a subject names: a model, a topic, all topics, or speculative decoding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ridgeline.config.rules import refuse
from ridgeline.config.settings import Settings
from ridgeline.config.shared import EXAMPLE_MODEL
from ridgeline.config.tools import ExplainOptions
from ridgeline.modelspec.families.shapes import shape_table
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
from ridgeline.workflows.explain.topics import all_topics, find_topics

if TYPE_CHECKING:
    from ridgeline.workflows.explain.explain_speculation import SpeculationExplanation


class Explanation(Result, frozen=True, kw_only=True):
    """What is known of a subject; the fields that do not belong to it are None or empty.

    `model`: a model's settings, decisions and techniques. `topic`: the pages of a setting, metric,
    technique, flag or error. `topics`: the names of all topics, by kind. `speculation`: whether
    speculative decoding pays. `is_example`: no model was named, so it is about the built-in one.
    """

    model: ModelExplanation | None = None
    topic: TopicExplanation | None = None
    topics: dict[str, list[str]] = {}
    speculation: SpeculationExplanation | None = None
    is_example: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The figures of the subject, without the empty fields."""
        for part in (self.model, self.topic, self.speculation):
            if part is not None:
                return part.to_dict()
        return {"topics": self.topics}


def explain(
    options: ExplainOptions,
    settings_of: Callable[[str], Settings],
    observer: Observer = silent,
) -> Explanation:
    """Explain the subject of the options; without a model, for the built-in example.

    `settings_of`: the engine settings for a model. Raises UserError.
    """
    options = _join_words(options)
    subject = options.subject
    if subject == "speculation":
        found = _speculation(options, settings_of, observer)
        return Explanation(speculation=found, is_example=options.model is None)
    if subject == "topics":
        return Explanation(topics=all_topics())
    load = ExplainLoad(
        workload=options.workload,
        slo=options.slo,
        request_rate=options.request_rate,
        accelerator=options.accelerator,
    )
    if subject is None or is_model(subject):
        refuse([options.model] if options.model else [], "after a model")
        settings = settings_of(_planned(subject or EXAMPLE_MODEL))
        return Explanation(model=explain_model(settings, load), is_example=subject is None)
    settings = settings_of(_planned(options.model or EXAMPLE_MODEL))
    topic = explain_topic(subject, settings, load)
    return Explanation(topic=topic, is_example=options.model is None)


def _planned(model: str) -> str:
    """The model, or the published shape of this name: no weights are read."""
    return f"dummy:{model}" if model in shape_table() and not Path(model).exists() else model


def _is_subject(word: str) -> bool:
    return word in ("speculation", "topics") or is_model(word) or bool(find_topics(word))


def _join_words(options: ExplainOptions) -> ExplainOptions:
    """The options with a topic of several words, given without quotes, as the subject.

    The model may follow it: `does not fit llama-3.1-8b`. Words that are no topic are the subject
    too, so that the error names them all, unless the first of two is a subject by itself.
    """
    if options.model is None:
        return options
    words = [str(options.subject), *options.model.split()]
    subject, model = " ".join(words), None
    if not find_topics(subject):
        if len(words) > 2 and find_topics(" ".join(words[:-1])):
            subject, model = " ".join(words[:-1]), words[-1]
        elif len(words) == 2 and _is_subject(words[0]):
            return options
    return msgspec.structs.replace(options, subject=subject, model=model)


def _speculation(
    options: ExplainOptions, settings_of: Callable[[str], Settings], observer: Observer
) -> SpeculationExplanation:
    unused = {
        "--workload": options.workload,
        "--slo": options.slo,
        "--request-rate": options.request_rate,
        "--accelerator": options.accelerator,
    }
    refuse([flag for flag, value in unused.items() if value], "on explain speculation")
    # imports torch, which no other subject needs
    from ridgeline.workflows.explain.explain_speculation import explain_speculation

    return explain_speculation(settings_of(options.model or EXAMPLE_MODEL), observer)
