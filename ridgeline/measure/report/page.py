"""One self-contained page about one run, or about a sweep of them: no script, nothing fetched.

Every text that came from outside (a server's address, an error message) is escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files

import msgspec

from ridgeline.measure.cost import Cost
from ridgeline.measure.metrics import Distribution
from ridgeline.measure.report.cdf import distribution
from ridgeline.measure.report.pictures import (
    Point,
    each_shown,
    latency_against_rate,
    timeline,
    user_against_device,
)
from ridgeline.measure.summary import Summary
from ridgeline.records import RunTrace, Slo

_ROWS = (
    ("ttft", "time to first token"),
    ("ttft_from_send", "… from the send"),
    ("tpot", "time per output token, per request"),
    ("itl", "inter-token latency, per token"),
    ("e2e", "end to end"),
    ("queue", "until it first ran"),
    ("publish", "computed until seen"),
)


class Told(msgspec.Struct, frozen=True):
    """Figures that came from beside the run: name, figure and remark of each."""

    title: str
    rows: tuple[tuple[str, str, str], ...]


Rows = tuple[tuple[str, Mapping[str, str]], ...]


class Runs(msgspec.Struct, frozen=True, kw_only=True):
    """Several runs: `points` of a sweep and its `knee`; behind each run's label (`label` says what
    those are) its figures by name, `rows`, and what was told of it meanwhile, `told`.
    """

    label: str = ""
    rows: Rows = ()
    told: Rows = ()
    points: Sequence[Point] = ()
    knee: float | None = None


ONE_RUN = Runs()


def bench_page(
    run: RunTrace,
    summary: Summary,
    slo: Slo | None,
    *,
    cost: Cost | None = None,
    beside: Sequence[Told] = (),
    runs: Runs = ONE_RUN,
) -> str:
    """`run` and `summary` are shown in full, beside all `runs` where there were several; `beside`
    is what the server and its machine told meanwhile.
    """
    style = files("ridgeline.measure.report").joinpath("style.css").read_text(encoding="utf-8")
    body = "".join(
        (
            _header(run, summary),
            _tiles(summary, cost),
            _sweep(runs.points, runs.knee),
            _runs(runs),
            _latency(summary, slo),
            _table(summary),
            _timeline(run),
            *map(_told, beside),
            _cost(cost),
            _warnings(run, summary),
        )
    )
    name = escape(f"Ridgeline: {run.target}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>{style}</style></head><body><main>{body}</main></body></html>"
    )


def _header(run: RunTrace, summary: Summary) -> str:
    facts = f"{run.workload} · {run.arrivals} · seed {run.seed} · {run.duration_s:.1f} s"
    lost = summary.num_requests - summary.num_ok
    told = f"{summary.num_ok} requests served" + (f", {lost} not" if lost else "")
    return (
        f'<header><div class="eyebrow">Ridgeline · {escape(facts)}</div>'
        f'<h1>{escape(run.target)}</h1><p class="lede">{told}.</p></header>'
    )


def _tiles(summary: Summary, cost: Cost | None) -> str:
    tiles = [
        ("output", f"{summary.output_tok_s:,.1f}", "tok/s", f"{summary.request_rate:.3g} req/s"),
        ("time to first token", _ms(summary.ttft, 50), "ms p50", f"p99 {_ms(summary.ttft, 99)} ms"),
        ("per output token", _ms(summary.tpot, 50), "ms p50", f"p99 {_ms(summary.tpot, 99)} ms"),
    ]
    good = summary.goodput
    if good is not None:
        share = f"{good.attainment:.0%} met [{good.attainment_low:.0%}, {good.attainment_high:.0%}]"
        tiles.append(("goodput", f"{good.goodput_req_s:.3g}", "req/s", share))
    elif cost is not None and cost.per_million_output is not None:
        tiles.append(("cost", f"${cost.per_million_output:.3g}", "per 1M output tokens", ""))
    cells = (
        f'<div class="tile"><div class="name">{name}</div>'
        f'<div class="now">{value} <small>{unit}</small></div><div class="was">{more}</div></div>'
        for name, value, unit, more in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _short(value: float) -> str:
    """Four figures, never in powers of ten."""
    return f"{value:,.4g}" if abs(value) < 9999.5 else f"{value:,.0f}"


def _ms(values: Distribution | None, q: float) -> str:
    return _short(1000 * values.p(q)) if values is not None else "–"


def _section(title: str, lede: str, inner: str) -> str:
    return f"<section><h2>{title}</h2><p>{lede}</p>{inner}</section>" if inner else ""


def _figure(picture: str) -> str:
    return f'<div class="figure">{picture}</div>' if picture else ""


def _sweep(points: Sequence[Point], knee: float | None) -> str:
    told = "Green marks kept the promise, red ones did not. The knee is the largest rate that held."
    by_rate = sorted(points, key=lambda point: point.rate)
    return _section(
        "Latency against rate", told, _figure(latency_against_rate(by_rate, knee))
    ) + _section(
        "One user against the whole device",
        "More load moves up and to the left: more tokens in all, fewer per second for each user.",
        _figure(user_against_device(by_rate)),
    )


def _runs(runs: Runs) -> str:
    if not runs.rows:
        return ""
    told = "Times in milliseconds; below, what the engine or server told meanwhile."
    return _section(
        "Every run", told, _by_run(runs.label, runs.rows) + _by_run(runs.label, runs.told)
    )


def _by_run(label: str, rows: Rows) -> str:
    names = dict.fromkeys(name for _, figures in rows for name in figures)
    head = "".join(f'<th class="num">{escape(name)}</th>' for name in (label, *names))
    body = "".join(
        f'<tr><td class="num">{escape(each)}</td>'
        + "".join(f'<td class="num">{escape(figures.get(name, "–"))}</td>' for name in names)
        + "</tr>"
        for each, figures in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>' if names else ""


def _latency(summary: Summary, slo: Slo | None) -> str:
    pictures = [
        _figure(distribution(name, (), values.values, limit))
        for name, values, limit in (
            ("TTFT", summary.ttft, slo.ttft_s if slo else None),
            ("TPOT", summary.tpot, slo.tpot_s if slo else None),
        )
        if values is not None
    ]
    inner = f'<div class="pair">{"".join(pictures)}</div>' if pictures else ""
    return _section("Distributions", "Share of requests that were at least as fast.", inner)


def _table(summary: Summary) -> str:
    head = "".join(f'<th class="num">{name}</th>' for name in ("mean", "p50", "p90", "p95", "p99"))
    rows = []
    for name, title in _ROWS:
        values: Distribution | None = getattr(summary, name)
        if values is None:
            continue
        cells = [_short(1000 * values.mean), *(_ms(values, q) for q in (50, 90, 95, 99))]
        shown = "".join(f'<td class="num">{cell}</td>' for cell in cells)
        rows.append(f'<tr><td>{title}</td>{shown}<td class="num">{values.count}</td></tr>')
    table = (
        f'<div class="scroll"><table><tr><th></th>{head}<th class="num">n</th></tr>'
        f"{''.join(rows)}</table></div>"
    )
    told = "Milliseconds, from the scheduled arrival unless named. Definitions: docs/concepts/measurements.md."
    return _section("Latencies", told, table)


def _timeline(run: RunTrace) -> str:
    told = "One line per request: grey until its first token, blue while tokens came, red if lost."
    if (each := each_shown(run)) > 1:
        told += f" One request in {each} is shown."
    return _section("Timeline", told, _figure(timeline(run)) if run.requests else "")


def _told(beside: Told) -> str:
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="num">{escape(figure)}</td>'
        f"<td>{escape(remark)}</td></tr>"
        for name, figure, remark in beside.rows
    )
    title = beside.title[:1].upper() + beside.title[1:]
    return _section(title, "", f'<div class="scroll"><table>{rows}</table></div>')


def _cost(cost: Cost | None) -> str:
    if cost is None:
        return ""
    rows = (
        ("1M output tokens, all of the machine", cost.per_million_output),
        ("1M input tokens, by time in prefill", cost.per_million_input_split),
        ("1M output tokens, by time in decode", cost.per_million_output_split),
        ("a request", cost.per_request),
        ("a request that kept the promise", cost.per_good_request),
    )
    shown = "".join(
        f"<dt>{name}</dt><dd>${value:.4g}</dd>" for name, value in rows if value is not None
    )
    return _section("Cost", f"At ${cost.dollars_per_hour:g} an hour.", f"<dl>{shown}</dl>")


def _warnings(run: RunTrace, summary: Summary) -> str:
    told = [f"invalid: {reason}" for reason in summary.validity.reasons]
    if summary.num_uncounted:
        told.append(f"{summary.num_uncounted} answers without a token count of the server")
    errors = Counter(request.error for request in run.requests if request.error)
    told += [f"{count} × {error}" for error, count in errors.most_common(5)]
    items = "".join(f"<li>{escape(line)}</li>" for line in told)
    return _section("Read with care", "", f"<ul>{items}</ul>" if items else "")
