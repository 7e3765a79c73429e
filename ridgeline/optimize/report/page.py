"""One self-contained page: style and pictures inside, nothing fetched, no script.

Every text that came from outside (a model's name, an error message) is escaped on its way in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from ridgeline.measure.report.cdf import distribution
from ridgeline.optimize.output import number_format
from ridgeline.optimize.output.vllm_command import VllmCommand
from ridgeline.optimize.report.checklist import checklist
from ridgeline.optimize.report.climb import climb
from ridgeline.optimize.report.forest import forest, forest_range
from ridgeline.optimize.report.roof import roofline
from ridgeline.optimize.report.style import VERDICT_CSS
from ridgeline.optimize.result import ConfigurationSummary, LadderResult, NotTried, Trial
from ridgeline.records import Slo


def report(result: LadderResult, shown: Mapping[str, VllmCommand]) -> str:
    """The whole page. `shown`: what deploys the result, by its heading."""
    style = files("ridgeline.measure.report").joinpath("style.css").read_text(encoding="utf-8")
    body = "".join(
        (
            _header(result),
            _tiles(result),
            _climb(result),
            _ladder(result),
            _roofline(result),
            _latency(result),
            _cost(result),
            _checklist(result),
            _deploy(result, shown),
            _left_out(result.not_tried),
            _how(result),
        )
    )
    name = escape(f"Ridgeline report: {result.provenance.model}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>{style}</style></head><body><main>{body}</main></body></html>"
    )


# ---- the head ----------------------------------------------------------------------------------


def _header(result: LadderResult) -> str:
    told = result.provenance
    facts = " · ".join((told.model, told.workload, told.slo, told.started))
    return (
        f'<header><div class="eyebrow">Ridgeline {escape(told.version)} · {escape(facts)}</div>'
        f"<h1>{escape(headline(result))}</h1>"
        f'<p class="lede">{escape(result.final.finding.sentence)}</p></header>'
    )


def headline(result: LadderResult) -> str:
    """The result in one line, with its interval; modest where nothing was kept."""
    if not result.kept:
        return f"Nothing beat the baseline on this machine ({result.ended})"
    names = {"goodput": "goodput", "cost": "tokens per dollar", "latency": "speed"}
    what = names[result.provenance.objective]
    if result.total is None:
        return f"{len(result.kept)} rung(s) kept; the total was not measured ({result.ended})"
    low, high = result.total.low, result.total.high
    return f"{result.total.mid:.1f}× the {what} ({low:.1f} to {high:.1f}, 95% interval)"


def _tiles(result: LadderResult) -> str:
    old, new = result.baseline.measured, result.final.measured
    rows = (
        (
            "Goodput",
            number_format.rate(old.goodput_req_s),
            number_format.rate(new.goodput_req_s),
            "req/s",
        ),
        ("Time to first token, p95", *_pair(old.ttft_p95_s, new.ttft_p95_s), ""),
        ("Time per output token, p95", *_pair(old.tpot_p95_s, new.tpot_p95_s), ""),
        (
            "Cost per 1M output tokens",
            number_format.cost(result.baseline.cost),
            number_format.cost(result.final.cost),
            "",
        ),
    )
    return f'<div class="tiles">{"".join(_tile(*row) for row in rows)}</div>'


def _pair(old: float | None, new: float | None) -> tuple[str, str]:
    return number_format.duration(old), number_format.duration(new)


def _tile(name: str, old: str, new: str, unit: str) -> str:
    suffix = f" <small>{escape(unit)}</small>" if unit else ""
    return (
        f'<div class="tile"><div class="name">{escape(name)}</div>'
        f'<div class="now">{escape(new)}{suffix}</div>'
        f'<div class="was">was {escape(old)}</div></div>'
    )


# ---- the pictures ------------------------------------------------------------------------------


def _climb(result: LadderResult) -> str:
    return _section(
        "The climb",
        "What each rung did to the objective, in the order in which they were tried. Whiskers are "
        "95% intervals; hollow marks are rungs that were taken back.",
        f'<div class="figure">{climb(result)}</div>',
    )


def _roofline(result: LadderResult) -> str:
    if result.peaks is None:
        return ""
    source = f" Peaks: {result.peaks.source}." if result.peaks.source else ""
    findings = "".join(
        f"<li>{escape(standing.label.capitalize())}: {escape(standing.finding.sentence)}</li>"
        for standing in (result.baseline, result.final)
    )
    return _section(
        "The roofline",
        "How fast each phase computed against what this machine can do. Left of the ridge, bytes "
        "are the limit; right of it, arithmetic is. The distance down to a mark is overhead."
        + source,
        f'<div class="figure">{roofline(result, result.peaks)}</div><ul>{findings}</ul>',
    )


def _latency(result: LadderResult) -> str:
    slo = Slo.parse(result.provenance.slo)
    old, new = result.baseline.samples, result.final.samples
    legend = (
        '<div class="legend"><span><i class="before"></i>'
        f"baseline at {escape(result.baseline.measured.load)}</span>"
        '<span><i class="after"></i>'
        f"final at {escape(result.final.measured.load)}</span></div>"
    )
    first = distribution("time to first token", old.ttft_s, new.ttft_s, slo.ttft_s)
    each = distribution("time per output token", old.tpot_s, new.tpot_s, slo.tpot_s)
    return _section(
        "Latency, before and after",
        "Each configuration at its own best load: the promise is what both have to keep, the "
        "final one for more requests.",
        f'{legend}<div class="pair"><div class="figure">{first}</div>'
        f'<div class="figure">{each}</div></div>',
    )


# ---- the tables --------------------------------------------------------------------------------


def _ladder(result: LadderResult) -> str:
    if not result.trials:
        return _section("The ladder", "No rung was tried: " + result.ended + ".", "")
    low, high = forest_range(result.trials)
    head = (
        "<tr><th>#</th><th>Rung</th><th class='num'>Predicted</th><th>Measured, 95% interval</th>"
        "<th class='num'>Ratio</th><th class='num'>Goodput, req/s</th><th>Verdict</th></tr>"
    )
    rows = "".join(
        _trial_rows(number, trial, forest(trial, low, high))
        for number, trial in enumerate(result.trials, 1)
    )
    return _section(
        "The ladder",
        "Every rung that was measured, also those that gained nothing. The hollow diamond is what "
        "the simulator had promised.",
        f'<div class="scroll"><table>{head}{rows}</table></div>',
    )


def _trial_rows(number: int, trial: Trial, cell: str) -> str:
    tag = f'<span class="tag {VERDICT_CSS[trial.verdict]}">{escape(trial.verdict)}</span>'
    return (
        f'<tr class="head"><td>{number}</td><td>{escape(trial.label)}</td>'
        f'<td class="num">{trial.predicted.gain:.2f}×</td><td class="cell">{cell}</td>'
        f'<td class="num">{escape(number_format.ratio(trial.ratio))}</td>'
        f'<td class="num">{escape(number_format.change(trial.before, trial.after))}</td><td>{tag}</td></tr>'
        f'<tr class="detail"><td></td><td colspan="6"><div class="why">{escape(trial.reason)}. '
        f"Tokens: {escape(number_format.quality(trial))}.</div>"
        f'<div class="flags">{escape(number_format.settings_line(trial.changes))}</div></td></tr>'
    )


def _left_out(not_tried: Sequence[NotTried]) -> str:
    if not not_tried:
        return ""
    rows = "".join(
        f"<tr><td>{escape(left.label)}</td><td>{escape(left.reason)}</td></tr>"
        for left in not_tried
    )
    return _section(
        "Not tried, and why",
        "",
        f'<div class="scroll"><table><tr><th>Rung</th><th>Reason</th></tr>{rows}</table></div>',
    )


def _cost(result: LadderResult) -> str:
    price = result.price
    quoted = f"at ${price.dollars_per_hour:g} per machine-hour"
    if price.notional:
        quoted += " (notional: give your own with --price-per-hour)"
    rows = "".join(_cost_row(standing) for standing in (result.baseline, result.final))
    head = (
        "<tr><th></th><th class='num'>$ per 1M output tokens</th>"
        "<th class='num'>$ per 1M tokens, in and out</th>"
        "<th class='num'>Output tokens/s within the SLO</th></tr>"
    )
    return _section(
        "Cost",
        f"{quoted}. Only tokens of requests that kept the SLO are counted: late ones were paid "
        "for, not delivered.",
        f'<div class="scroll"><table>{head}{rows}</table></div>',
    )


def _cost_row(standing: ConfigurationSummary) -> str:
    return (
        f"<tr><td>{escape(standing.label.capitalize())}</td>"
        f'<td class="num">{number_format.dollars(standing.cost.output_dollars_per_mtok)}</td>'
        f'<td class="num">{number_format.dollars(standing.cost.total_dollars_per_mtok)}</td>'
        f'<td class="num">{number_format.rate(standing.measured.good_output_tok_s)}</td></tr>'
    )


def _checklist(result: LadderResult) -> str:
    rows = "".join(
        f"<tr><td>{escape(line.group)}</td><td>{escape(line.what)}</td>"
        f'<td class="num">{escape(line.before)}</td><td class="num">{escape(line.after)}</td>'
        f'<td><span class="tag {line.css}">{escape(line.says)}</span></td></tr>'
        for line in checklist(result)
    )
    head = (
        "<tr><th></th><th></th><th class='num'>Before</th><th class='num'>After</th><th></th></tr>"
    )
    return _section(
        "Before and after",
        "",
        f'<div class="scroll"><table>{head}{rows}</table></div>',
    )


# ---- the end -----------------------------------------------------------------------------------


def _deploy(result: LadderResult, shown: Mapping[str, VllmCommand]) -> str:
    steps = "\n".join(result.next_steps)
    return _section(
        "Use it",
        "",
        f"<h3>What to run next</h3><pre>{escape(steps)}</pre>"
        + "".join(_shown(heading, command) for heading, command in shown.items()),
    )


def _shown(heading: str, command: VllmCommand) -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in command.notes)
    text = escape(command.text.strip())
    return f"<h3>{escape(heading)}</h3><pre>{text}</pre>" + (f"<ul>{notes}</ul>" if notes else "")


def _how(result: LadderResult) -> str:
    told = result.provenance
    advice = "".join(
        f"<li><b>{escape(found.symptom)}</b> {escape(found.cause)} {escape(found.fix)} "
        f"Not when: {escape(found.not_when)}</li>"
        for found in result.final.advice
    )
    more = f"<h3>What the final run shows</h3><ul>{advice}</ul>" if advice else ""
    facts = {
        "ended": f"{result.ended}, after {told.spent_s:.0f} of {told.budget_s:.0f} s",
        "objective": told.objective,
        "seed": told.seed,
        **{f"machine {name}": value for name, value in told.machine.items()},
        **{f"model {name}": value for name, value in told.model_facts.items()},
    }
    return _section(
        "How it was measured", "", f"<p>{escape(told.protocol)}</p>{_list(facts.items())}{more}"
    )


def _list(pairs: Iterable[tuple[str, Any]]) -> str:
    rows = "".join(
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(_figure(value))}</dd>"
        for name, value in pairs
    )
    return f"<dl>{rows}</dl>"


def _figure(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _section(name: str, intro: str, body: str) -> str:
    lead = f"<p>{escape(intro)}</p>" if intro else ""
    return f"<section><h2>{escape(name)}</h2>{lead}{body}</section>"
