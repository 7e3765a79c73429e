"""The plan as one page: the front drawn, the fleets, the commands. No script, nothing fetched."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from ridgeline.measure.report import svg
from ridgeline.measure.report.svg import Scale
from ridgeline.plan.fleet.search import Candidate
from ridgeline.records import Slo

if TYPE_CHECKING:
    from ridgeline.workflows.planning.plan import PlanResult

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 340, 64, 20, 40, 46


def plan_page(plan: PlanResult, slo: Slo) -> str:
    """Self-contained HTML; every text is escaped."""
    style = files("ridgeline.measure.report").joinpath("style.css").read_text(encoding="utf-8")
    demand = plan.demand
    lede = (
        f"{demand.rate:g} requests/s of {demand.isl} tokens in, {demand.osl} out, under {slo}; "
        f"{plan.num_candidates:,} candidates."
    )
    split = plan.disaggregation
    told = f"{'Yes' if split.yes else 'No'}: {split.why}."
    started = "".join(
        f'<h3>{escape(name)}</h3><pre style="white-space:pre-wrap">{escape(text)}</pre>'
        for name, text in plan.commands.items()
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in plan.notes)
    body = (
        f'<header><div class="eyebrow">Ridgeline plan</div><h1>{escape(plan.model)}</h1>'
        f'<p class="lede">{escape(lede)}</p></header>'
        f"<section><h2>Fleets</h2>{_table(plan.fleets)}</section>"
        f'<section><h2>The front</h2><div class="figure">{front_picture(plan.front, slo)}</div>'
        "<p>Green keeps the promise for this demand, red does not: it may be fast enough for each "
        "token and still queue for too long.</p>"
        f"</section><section><h2>Memory of one device</h2>{_memory(plan)}"
        f"</section><section><h2>Disaggregate?</h2><p>{escape(told)}</p></section>"
        f"<section><h2>Start one replica</h2>{started}</section>"
        f"<section><h2>Read with care</h2><ul>{notes}</ul></section>"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(f'Ridgeline plan: {plan.model}')}</title><style>{style}</style></head>"
        f"<body><main>{body}</main></body></html>"
    )


def front_picture(front: Sequence[Candidate], slo: Slo) -> str:
    """tok/s per user against tok/s per device; the line is the speed that the promise asks for."""
    if len(front) < 2:
        return ""
    users = [each.tok_s_user for each in front]
    if slo.tpot_s is not None:
        users.append(1 / slo.tpot_s)
    rates = [each.tok_s_device for each in front]
    x = _scale(users, LEFT, WIDTH - RIGHT)
    y = _scale(rates, HEIGHT - BOTTOM, TOP)
    parts = [
        svg.x_axis(x, TOP, HEIGHT - BOTTOM, "tok/s per user (1 / TPOT)"),
        svg.y_axis(y, LEFT, WIDTH - RIGHT, "output tok/s per device"),
    ]
    if slo.tpot_s is not None:
        at = x(1 / slo.tpot_s)
        parts.append(svg.line(at, TOP, at, HEIGHT - BOTTOM, "slo"))
        words = f"SLO {1000 * slo.tpot_s:g} ms a token"
        parts.append(svg.text(at + 5, HEIGHT - BOTTOM - 8, words, "slo-label"))
    parts.append(svg.path([(x(e.tok_s_user), y(e.tok_s_device)) for e in front], "way"))
    for each in front:
        tip = f"{each.device} {each.layout} {each.weight_dtype}, {each.batch} in flight"
        css = "mark good" if each.holds else "mark bad"
        parts.append(svg.mark("circle", x(each.tok_s_user), y(each.tok_s_device), 4, css, tip))
    return svg.drawing(WIDTH, HEIGHT, "Interactivity against throughput", *parts)


def _scale(values: Sequence[float], start: float, end: float) -> Scale:
    return Scale(low=min(values) / 1.2, high=max(values) * 1.2, start=start, end=end, log=True)


def _table(fleets: Sequence[Candidate]) -> str:
    names = ("TTFT ms", "80 %", "TPOT ms", "80 %", "$/h", "$/1M in", "$/1M out", "kW")
    head = "".join(f"<th>{name}</th>" for name in ("fleet", "weights", "KV"))
    head += "".join(f'<th class="num">{name}</th>' for name in names)
    rows = "".join(_row(each) for each in fleets)
    return f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'


def _row(each: Candidate) -> str:
    words = (
        f"{each.num_replicas} x {each.device} {each.layout}",
        each.weight_dtype,
        each.kv_dtype,
    )
    numbers = (
        _ms(each.ttft_s),
        _interval(each.ttft_interval_s),
        _ms(each.tpot_s),
        _interval(each.tpot_interval_s),
        "" if each.dollars_per_hour is None else f"{each.dollars_per_hour:.2f}",
        "" if each.input_dollars_per_mtok is None else f"{each.input_dollars_per_mtok:.3g}",
        "" if each.output_dollars_per_mtok is None else f"{each.output_dollars_per_mtok:.3g}",
        "" if each.watts is None else f"{each.watts / 1000:.1f}",
    )
    told = "".join(f"<td>{escape(cell)}</td>" for cell in words)
    told += "".join(f'<td class="num">{escape(cell)}</td>' for cell in numbers)
    return f"<tr>{told}</tr>"


def _memory(plan: PlanResult) -> str:
    """The winner's, line by line."""
    best, found = plan.fleets[0], plan.memory
    rows = [(name, f"{nbytes / 1e9:.2f} GB") for name, nbytes in found.rows()]
    copies = "" if found.kv_copies == 1 else f", each number held {found.kv_copies:g} times"
    rows.append(("KV per token", f"{found.kv_bytes_per_token:,.0f} B{copies}"))
    rows.append(("KV of the replica", f"{found.kv_tokens:,} tokens"))
    told = "".join(f'<tr><td>{name}</td><td class="num">{value}</td></tr>' for name, value in rows)
    what = escape(f"{best.device}, {best.layout}, {best.weight_dtype} weights, {best.kv_dtype} KV")
    return f'<p>{what}</p><div class="scroll"><table>{told}</table></div>'


def _interval(seconds: tuple[float, float]) -> str:
    low, high = (_ms(value) for value in seconds)
    return f"{low} .. {high}"


def _ms(seconds: float) -> str:
    """Three digits, without powers of ten."""
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
