"""Explain a model's settings on this machine, or a topic: no weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.config.settings import Settings
from ridgeline.diagnose.conditions import Value
from ridgeline.diagnose.rules.decisions import DecisionAnswer, walk
from ridgeline.engine.tokenization import NoTokenizer, load_tokenizer
from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import find_accelerator
from ridgeline.hardware.machine import Machine
from ridgeline.hardware.probe import probe
from ridgeline.measure.workload import parse_workload
from ridgeline.modelspec.checkpoints.locate import is_short_name
from ridgeline.modelspec.families.shapes import shape_table
from ridgeline.records import Slo
from ridgeline.report.result import Result
from ridgeline.workflows.configuration_costs import ConfigurationCosts
from ridgeline.workflows.explain.accelerator_machine import machine_of
from ridgeline.workflows.explain.recommendations import (
    PricedConfiguration,
    Recommendation,
    recommendations,
)
from ridgeline.workflows.explain.static_facts import static_facts
from ridgeline.workflows.explain.topics import find_topics, topic_page, unknown_topic
from ridgeline.workflows.explain.topics.base import TopicContext, TopicPage
from ridgeline.workflows.load.token_workload import TEXT_WORKLOAD, TOKEN_WORKLOAD
from ridgeline.workflows.load.tokenized_workload import TokenizedWorkload, sample_requests

DEFAULT_SLO = "ttft:500 tpot:50"


class ExplainLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load that the arithmetic is about; `request_rate` in requests/s if one is offered.

    `accelerator`: a device of the catalogue to reckon with; None for this machine.
    """

    workload: str | None = None
    slo: str | None = None
    request_rate: float | None = None
    accelerator: str | None = None

    def __post_init__(self) -> None:
        if self.request_rate is not None and not self.request_rate > 0:
            raise BadInput("--request-rate must be positive", value=self.request_rate, limit="> 0")


class ModelExplanation(Result, frozen=True, kw_only=True):
    """A model's settings with their derivations, the decisions, and every technique's verdict.

    `decisions`: the answers of the decision flowchart for this workload and SLO; bounds by the
    roofline, so that a no is final and a yes has to be measured.
    """

    settings: dict[str, Any]
    derivations: dict[str, str]
    rewrites: tuple[str, ...]
    workload: str
    slo: str
    decisions: tuple[DecisionAnswer, ...]
    facts: dict[str, Value]
    techniques: tuple[Recommendation, ...]


class TopicExplanation(Result, frozen=True, kw_only=True):
    """The pages of a subject: more than one if several kinds of topic share its name.

    `machine`: the accelerator that they are about, or this machine.
    """

    model: str
    machine: str
    pages: tuple[TopicPage, ...]


def is_model(subject: str) -> bool:
    """Whether a subject names a model rather than a topic. A path does, even a wrong one."""
    names = is_short_name(subject) or subject in shape_table()
    return names or "/" in subject or Path(subject).exists()


def explain_model(settings: Settings, load: ExplainLoad | None = None) -> ModelExplanation:
    """Explain the settings of a model on this machine. UserError if it cannot run with them."""
    load = load or ExplainLoad()
    settings = settings_for(settings, load)
    resolved = costs_of(load).resolved(settings)
    workload, facts = facts_of(settings, load)
    return ModelExplanation(
        settings=resolved.values(),
        derivations=dict(resolved.derivations),
        rewrites=tuple(resolved.spec.rewrites),
        workload=workload,
        slo=load.slo or DEFAULT_SLO,
        decisions=tuple(walk(facts)),
        facts=dict(facts),
        techniques=tuple(technique_verdicts(settings, load)),
    )


def explain_topic(
    subject: str, settings: Settings, load: ExplainLoad | None = None
) -> TopicExplanation:
    """Explain a technique, metric, flag, verdict or error for a model on this machine.

    Raises BadInput with the closest names if there is no such topic.
    """
    topics = find_topics(subject)
    if not topics:
        raise unknown_topic(subject)
    load = load or ExplainLoad()
    context = topic_context(settings_for(settings, load), load)
    pages = tuple(topic_page(kind, id, context) for kind, id in topics)
    machine = load.accelerator or "this machine"
    return TopicExplanation(model=settings.model, machine=machine, pages=pages)


def topic_context(settings: Settings, load: ExplainLoad) -> TopicContext:
    """The context of a topic, computed when a page needs it."""
    return TopicContext(
        facts=lambda: facts_of(settings, load)[1],
        recommendations=lambda: technique_verdicts(settings, load),
        derivations=lambda: costs_of(load).resolved(settings).derivations,
    )


def facts_of(settings: Settings, load: ExplainLoad) -> tuple[str, Mapping[str, Value]]:
    """The name of the workload, and the facts about it that need no run."""
    tokenizer = load_tokenizer(settings.model)
    default = TOKEN_WORKLOAD if isinstance(tokenizer, NoTokenizer) else TEXT_WORKLOAD
    name = load.workload or default
    workload = TokenizedWorkload(parse_workload(name), tokenizer)
    sample = sample_requests(workload, costs_of(load).resolved(settings).max_model_len)
    slo = Slo.parse(load.slo or DEFAULT_SLO)
    facts = static_facts(
        machine_for(load),
        settings,
        sample,
        slo,
        load.request_rate,
        elsewhere=bool(load.accelerator),
    )
    return name, {**facts, **device_fact(load)}


def machine_for(load: ExplainLoad) -> Machine:
    """This machine, or the accelerator's record. Raises BadInput for an unknown one."""
    if load.accelerator is None:
        return probe()
    return machine_of(find_accelerator(load.accelerator))


def costs_of(load: ExplainLoad) -> ConfigurationCosts:
    """Costs on the machine that is explained."""
    return ConfigurationCosts(machine_for(load), elsewhere=load.accelerator is not None)


def device_fact(load: ExplainLoad) -> dict[str, Value]:
    """The kind of device that the preconditions of rungs see, if it is not this machine's."""
    if load.accelerator is None:
        return {}
    kind = machine_for(load).architecture
    return {"device": "cuda" if kind == "gpu" else kind}


def settings_for(settings: Settings, load: ExplainLoad) -> Settings:
    """The settings, in bfloat16 on an accelerator that has it, as its servers run."""
    if load.accelerator is None or settings.dtype != "auto":
        return settings
    if "bfloat16" not in find_accelerator(load.accelerator).peak_flops:
        return settings
    return msgspec.structs.replace(settings, dtype="bfloat16")


def technique_verdicts(settings: Settings, load: ExplainLoad | None = None) -> list[Recommendation]:
    """Every rung of the ladder, judged by arithmetic with the machine's rates."""
    load = load or ExplainLoad()
    costs = costs_of(load)

    def price(chosen: Settings) -> PricedConfiguration:
        # No bound depends on the thread counts, and measuring them takes seconds.
        unmeasured = msgspec.structs.replace(chosen, thread_plan="fixed")
        resolved = costs.resolved(unmeasured)
        return PricedConfiguration(
            values={
                **resolved.values(),
                "thread_plan": chosen.thread_plan,
                **device_fact(load),
            },
            spec=resolved.spec,
            peaks=costs.peaks(unmeasured),
        )

    return list(recommendations(settings, price))
