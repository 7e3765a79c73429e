"""The console reports of `ridgeline explain`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ridgeline.config.shared import EXAMPLE_MODEL
from ridgeline.diagnose.rules.decisions import DecisionAnswer
from ridgeline.workflows.explain.explain import ModelExplanation, TopicExplanation
from ridgeline.workflows.explain.explain_speculation import (
    DEPTH,
    SpeculationCase,
    SpeculationExplanation,
)
from ridgeline.workflows.explain.explain_subject import Explanation
from ridgeline.workflows.explain.recommendations import Recommendation
from ridgeline.workflows.explain.topics.base import TopicPage


def print_explanation(explanation: Explanation, out: Console) -> None:
    """The report of any explanation."""
    if explanation.model is not None:
        print_model_explanation(explanation.model, out)
    elif explanation.topic is not None:
        print_topic_explanation(explanation.topic, out)
    elif explanation.speculation is not None:
        print_speculation(explanation.speculation, out)
    else:
        out.print(topics_table(explanation.topics))
    if explanation.is_example:
        out.print(EXAMPLE_NOTE)


EXAMPLE_NOTE = (
    f"\n[dim]The figures are about {EXAMPLE_MODEL}, the model that ships with Ridgeline. Of yours: "
    "add MODEL, as in `ridgeline explain high ttft llama-3.1-8b --accelerator h100-sxm`.[/dim]"
)


def explanation_json(explanation: Explanation) -> object:
    """What `--json` prints: the record's main part."""
    if explanation.model is not None:
        return explanation.model.to_dict()
    if explanation.topic is not None:
        return explanation.topic.pages
    return explanation.topics if explanation.speculation is None else explanation.speculation.cases


def print_model_explanation(explanation: ModelExplanation, out: Console) -> None:
    """A summary, the decisions, the techniques, and the settings."""
    out.print(f"[bold]{explanation.workload} under {explanation.slo}[/bold]")
    out.print(_summary_table(explanation))
    out.print("\n[bold]Before anything is run[/bold]")
    out.print("Bounds by the roofline: a no is final, a yes has to be measured.")
    out.print(_decision_table(explanation.decisions))
    out.print("\n[bold]Techniques[/bold]")
    out.print(_technique_table(explanation.techniques))
    out.print("\n[bold]Settings[/bold]")
    out.print(_settings_table(explanation))


def print_topic_explanation(explanation: TopicExplanation, out: Console) -> None:
    """Every page of the topic."""
    for page in explanation.pages:
        where = f"for {explanation.model} on {explanation.machine}"
        out.print(f"[bold]{page.title}[/bold] ({page.kind}), {where}")
        out.print(_page_table(page))


def topics_table(topics: Mapping[str, Sequence[str]]) -> Table:
    """One row per kind of topic."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for kind, ids in topics.items():
        table.add_row(kind, ", ".join(ids))
    return table


def print_speculation(explanation: SpeculationExplanation, out: Console) -> None:
    """A table and a verdict per workload and batch size."""
    for case in explanation.cases:
        rates = " ".join(f"{rate:.2f}" for rate in case.alpha[:DEPTH]) or "nothing was drafted"
        out.print(
            f"[bold]{explanation.method}, {case.workload}, batch {case.batch}[/bold]: a step "
            f"without drafts takes {case.step_ms:.2f} ms; acceptance by position: {rates}"
        )
        out.print(_speculation_table(case))
        out.print(f"verdict: {case.verdict}\n")


SUMMARY = {
    "moves the bound": "faster by the bound",
    "measure it": "worth measuring",
    "in use": "already in use",
}


def _summary_table(explanation: ModelExplanation) -> Table:
    """Questions answered by no, techniques that would help, and the command that tries them."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for answer in explanation.decisions:
        if answer.answer is False:
            table.add_row("[red]no[/red]", escape(answer.question))
    for verdict, label in SUMMARY.items():
        titles = [row.title for row in explanation.techniques if row.verdict == verdict]
        if titles:
            table.add_row(label, escape("; ".join(titles)))
    table.add_row("next", f"ridgeline optimize {escape(str(explanation.settings['model']))}")
    return table


def _settings_table(explanation: ModelExplanation) -> Table:
    """One row per setting, and one per technique applied to the model."""
    table = Table(box=None, pad_edge=False)
    for name, style in (("setting", ""), ("value", "bold"), ("why", "dim")):
        table.add_column(name, style=style)
    for name, value in explanation.settings.items():
        table.add_row(name, _value(name, value), explanation.derivations.get(name, ""))
    for rewrite in explanation.rewrites:
        table.add_row("technique", "", rewrite)
    return table


def _value(name: str, value: object) -> str:
    if value is None:
        return "off"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and name.endswith("_bytes"):
        return f"{value:,} ({value / 2**20:,.1f} MiB)"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _decision_table(answers: Sequence[DecisionAnswer]) -> Table:
    """One row per question, with its answer, the numbers, and the techniques it speaks for."""
    table = Table(box=None, pad_edge=False)
    for name, style in (("question", ""), ("", "bold"), ("because", "")):
        table.add_column(name, style=style)
    for answer in answers:
        text = {True: "yes", False: "[red]no[/red]", None: "[dim]open[/dim]"}[answer.answer]
        techniques = ""
        if answer.techniques:
            techniques = f" [dim]→ {', '.join(answer.techniques)}[/dim]"
        table.add_row(answer.question, text, answer.why + techniques)
    return table


def _technique_table(techniques: Sequence[Recommendation]) -> Table:
    """One row per technique: what it would do here, and when it hurts."""
    table = Table(box=None, pad_edge=False)
    for name, style in (("technique", ""), ("here", "bold"), ("why", "dim")):
        table.add_column(name, style=style)
    for technique in techniques:
        table.add_row(
            technique.title,
            technique.verdict,
            f"{technique.reason}. Hurts when: {technique.hurts_when}",
        )
    return table


def _page_table(page: TopicPage) -> Table:
    """One row per line; repeated labels are printed once."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    previous = ""
    for label, text in page.lines:
        if text:
            table.add_row("" if label == previous else label, escape(text))
            previous = label
    return table


def _speculation_table(case: SpeculationCase) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("drafts", "T / T plain", "break-even", "tokens a step", "gain"):
        table.add_column(name, justify="right")
    for row in case.rows:
        even = "none" if row.break_even is None else f"{row.break_even:.2f}"
        numbers = f"{row.slower:.2f}", even, f"{row.tokens:.2f}", f"{row.gain:.2f}"
        table.add_row(str(row.depth), *numbers)
    return table
