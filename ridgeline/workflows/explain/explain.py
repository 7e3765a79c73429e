"""`ridgeline explain [SUBJECT] [MODEL]`.

A model: every setting as it would be used, and why; the decision flowchart, answered for this
model, machine, workload and promise; then every technique of the ladder, and why it is or is not
for them. A technique, metric, flag, verdict or error (topics/): what it is, and what it is here.
Loads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ridgeline.config.settings import Settings
from ridgeline.diagnose.conditions import Value
from ridgeline.diagnose.rules.decisions import Answered, walk
from ridgeline.engine.config import ResolvedSettings, resolve
from ridgeline.engine.tokenization import NoTokenizer, load_tokenizer
from ridgeline.errors import BadInput
from ridgeline.hardware.probe import probe
from ridgeline.measure.workload import parse_workload
from ridgeline.modelspec.checkpoints.locate import is_built_in
from ridgeline.records import Slo
from ridgeline.report.json_line import json_line
from ridgeline.workflows.configuration_costs import ConfigurationCosts
from ridgeline.workflows.explain.recommendations import Here, Recommendation, recommendations
from ridgeline.workflows.explain.static_bounds import facts_before
from ridgeline.workflows.explain.topics import find, page, unknown
from ridgeline.workflows.explain.topics.base import Known, Page
from ridgeline.workflows.explain.topics.topic_index import listed
from ridgeline.workflows.explain.topics.topic_index import render as render_list
from ridgeline.workflows.load.tokenized_workload import TokenizedWorkload, sample_requests

WORKLOAD = "chat-and-code"
WORKLOAD_WITHOUT_TEXT = "synthetic:input=512,output=128"  # for a model without a tokenizer
SLO = "ttft:500 tpot:50"


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the arithmetic is to be about; requests per second where a load is offered."""

    workload: str | None = None
    slo: str | None = None
    request_rate: float | None = None

    def __post_init__(self) -> None:
        if self.request_rate is not None and not self.request_rate > 0:
            raise BadInput("--request-rate must be positive", value=self.request_rate, limit="> 0")


def is_model(subject: str) -> bool:
    """Does it name a model, not a subject? What looks like a path does, even a wrong one."""
    return is_built_in(subject) or "/" in subject or Path(subject).exists()


def command(settings: Settings, asked: Asked, json: bool = False) -> int:
    """Explain a model; the exit code. Raises UserError where its settings cannot be."""
    resolved = resolve(settings)
    workload, facts = facts_of(settings, asked)
    answers, told = list(walk(facts)), techniques(settings)
    if json:
        more = {"decisions": msgspec.to_builtins(answers), "facts": facts}
        print(json_line({**as_json(resolved), **more, "techniques": msgspec.to_builtins(told)}))
        return 0
    out = Console(highlight=False)
    out.print(render(resolved))
    out.print(f"\n[bold]Before anything is run[/bold]: {workload} under {asked.slo or SLO}")
    out.print("Bounds by this machine's roofline: a no is final, a yes still has to be measured.")
    out.print(render_decisions(answers))
    out.print()
    out.print(render_techniques(told))
    return 0


def subject_command(subject: str, settings: Settings, asked: Asked, json: bool = False) -> int:
    """Explain a technique, metric, flag, verdict or error; the exit code."""
    out = Console(highlight=False)
    if subject == "topics":
        if json:
            print(json_line(listed()))
        else:
            out.print(render_list())
        return 0
    found = find(subject)
    if not found:
        raise unknown(subject)
    known = known_of(settings, asked)
    pages = [page(kind, id, known) for kind, id in found]
    if json:
        print(json_line(pages))
        return 0
    for told in pages:
        out.print(f"[bold]{told.title}[/bold] ({told.kind}), for {settings.model} on this machine")
        out.print(render_page(told))
    return 0


def known_of(settings: Settings, asked: Asked) -> Known:
    """The place in which a subject is explained."""
    return Known(
        facts=lambda: facts_of(settings, asked)[1],
        told=lambda: techniques(settings),
        derivations=lambda: resolve(settings).derivations,
    )


def facts_of(settings: Settings, asked: Asked) -> tuple[str, Mapping[str, Value]]:
    """The workload's name, and what is known before it is run."""
    tokenizer = load_tokenizer(settings.model)
    default = WORKLOAD_WITHOUT_TEXT if isinstance(tokenizer, NoTokenizer) else WORKLOAD
    name = asked.workload or default
    sample = sample_requests(TokenizedWorkload(parse_workload(name), tokenizer), resolve(settings))
    slo = Slo.parse(asked.slo or SLO)
    return name, facts_before(probe(), settings, sample, slo, asked.request_rate)


def techniques(settings: Settings) -> list[Recommendation]:
    """Every rung of the ladder, judged by arithmetic against this machine's probe."""
    numbers = ConfigurationCosts(probe())

    def price(chosen: Settings) -> Here:
        resolved = numbers.resolved(chosen)
        return Here(values=resolved.values(), spec=resolved.spec, peaks=numbers.peaks(chosen))

    return list(recommendations(settings, price))


def render_decisions(answers: list[Answered]) -> Table:
    """One row per question on the way, with its answer, its numbers, and what it speaks for."""
    table = Table(box=None, pad_edge=False)
    for name, style in (("question", ""), ("", "bold"), ("because", "")):
        table.add_column(name, style=style)
    for each in answers:
        answer = {True: "yes", False: "[red]no[/red]", None: "[dim]open[/dim]"}[each.answer]
        tried = f" [dim]→ {', '.join(each.techniques)}[/dim]" if each.techniques else ""
        table.add_row(each.question, answer, each.why + tried)
    return table


def render_page(told: Page) -> Table:
    """One row per line; a label that repeats is not printed again."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    before = ""
    for label, text in told.lines:
        if text:
            table.add_row("" if label == before else label, escape(text))
            before = label
    return table


def render_techniques(told: list[Recommendation]) -> Table:
    """One row per technique: what it would do here, and when it hurts."""
    table = Table(box=None, pad_edge=False)
    for name, style in (("technique", ""), ("here", "bold"), ("why", "dim")):
        table.add_column(name, style=style)
    for each in told:
        table.add_row(each.title, each.verdict, f"{each.reason}. Hurts when: {each.hurts_when}")
    return table


def as_json(resolved: ResolvedSettings) -> dict[str, object]:
    """Values, their derivations, and the techniques applied to the model."""
    return {
        "settings": resolved.values(),
        "derivations": resolved.derivations,
        "rewrites": list(resolved.spec.rewrites),
    }


def render(resolved: ResolvedSettings) -> Table:
    """One row per setting, and one per technique applied to the model's spec."""
    table = Table(box=None, pad_edge=False)
    for name, style in (("setting", ""), ("value", "bold"), ("why", "dim")):
        table.add_column(name, style=style)
    for name, value in resolved.values().items():
        table.add_row(name, shown(name, value), resolved.derivations.get(name, ""))
    for rewrite in resolved.spec.rewrites:
        table.add_row("technique", "", rewrite)
    return table


def shown(name: str, value: object) -> str:
    """A value as a person reads it."""
    if value is None:
        return "off"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and name.endswith("_bytes"):
        return f"{value:,} ({value / 2**20:,.1f} MiB)"
    return f"{value:,}" if isinstance(value, int) else str(value)
