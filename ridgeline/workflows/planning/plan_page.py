"""The page of a plan: fleets, the Pareto front, memory of a device, and the start commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from ridgeline.modelspec.cost.serving_formats import SHORT_DTYPES
from ridgeline.plan.fleet.search import Candidate
from ridgeline.records import Slo
from ridgeline.report import svg
from ridgeline.report.html import HtmlTable, render_page
from ridgeline.report.numbers import rounded
from ridgeline.report.svg import Scale

if TYPE_CHECKING:
    from ridgeline.workflows.planning.plan import PlanResult

HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 340, 58, 20, 40, 46


def plan_page(plan: PlanResult, slo: Slo) -> str:
    """Self-contained HTML of a plan."""
    demand, best = plan.demand, plan.fleets[0]
    return render_page(
        "workflows/planning/plan.html",
        title=f"Ridgeline plan: {plan.model}",
        eyebrow="Ridgeline plan",
        heading=plan.model,
        lede=f"{demand.rate:g} requests/s of {demand.isl} tokens in, {demand.osl} out, under "
        f"{slo}; {plan.num_candidates:,} candidates.",
        bill="" if plan.bill is None else plan.bill.sentence,
        fleets=_fleets(plan.fleets, slo.attainment),
        front=front_figure(plan.front, slo),
        memory=_memory(plan),
        memory_intro=f"{best.device}, {best.layout}, {best.weight_dtype} weights, "
        f"{best.kv_dtype} KV",
        disaggregation=f"{'Yes' if plan.disaggregation.yes else 'No'}: {plan.disaggregation.why}.",
        commands=plan.commands,
        notes=plan.notes,
    )


def front_figure(front: Sequence[Candidate], slo: Slo) -> Markup:
    """tok/s per user against tok/s per device; the line is the speed that the SLO requires."""
    return svg.figure(lambda width: _front(front, slo, width)) if len(front) > 1 else Markup()


def _front(front: Sequence[Candidate], slo: Slo, width: int) -> Markup:
    users = [candidate.tok_s_user for candidate in front]
    if slo.tpot_s is not None:
        users.append(1 / slo.tpot_s)
    x = _scale(users, LEFT, width - RIGHT)
    y = _scale([candidate.tok_s_device for candidate in front], HEIGHT - BOTTOM, TOP)
    parts = [
        svg.x_axis(x, TOP, HEIGHT - BOTTOM, "tok/s per user (1 / TPOT)"),
        svg.y_axis(y, LEFT, width - RIGHT, "output tok/s per device"),
    ]
    if slo.tpot_s is not None:
        at = x(1 / slo.tpot_s)
        parts.append(svg.line(at, TOP, at, HEIGHT - BOTTOM, "slo"))
        label = f"SLO {1000 * slo.tpot_s:g} ms per token"
        parts.append(svg.text(at + 5, HEIGHT - BOTTOM - 8, label, "slo-label"))
    parts.append(svg.path([(x(c.tok_s_user), y(c.tok_s_device)) for c in front], "way"))
    for candidate in front:
        tip = (
            f"{candidate.device} {candidate.layout} {candidate.weight_dtype}, "
            f"{candidate.batch} in flight"
        )
        css = "mark good" if candidate.holds else "mark bad"
        place = x(candidate.tok_s_user), y(candidate.tok_s_device)
        parts.append(svg.mark("circle", *place, 4, css, tip))
    return svg.drawing(width, HEIGHT, "Interactivity against throughput", *parts)


def _scale(values: Sequence[float], start: float, end: float) -> Scale:
    return Scale(low=min(values) / 1.2, high=max(values) * 1.2, start=start, end=end, log=True)


def _fleets(fleets: Sequence[Candidate], attainment: float) -> HtmlTable:
    """Latencies at the SLO's attainment, under the demanded load."""
    share = f"p{100 * attainment:g} ms"
    latencies = (f"TTFT {share}", "80 %", f"TPOT {share}", "80 %")
    return HtmlTable(
        columns=("fleet", "weights", "KV", *latencies, "$/h", "$/1M in", "$/1M out", "kW"),
        rows=[_fleet_row(candidate) for candidate in fleets],
        num_text=3,
    )


def _fleet_row(fleet: Candidate) -> tuple[str, ...]:
    prices = (
        (fleet.dollars_per_hour, ".2f"),
        (fleet.input_dollars_per_mtok, ".3g"),
        (fleet.output_dollars_per_mtok, ".3g"),
        (None if fleet.watts is None else fleet.watts / 1000, ".1f"),
    )
    return (
        f"{fleet.num_replicas} x {fleet.device} {fleet.layout}",
        SHORT_DTYPES.get(fleet.weight_dtype, fleet.weight_dtype),
        SHORT_DTYPES.get(fleet.kv_dtype, fleet.kv_dtype),
        _ms(fleet.ttft_s),
        _ms_range(fleet.ttft_interval_s),
        _ms(fleet.tpot_s),
        _ms_range(fleet.tpot_interval_s),
        *("" if value is None else f"{value:{fmt}}" for value, fmt in prices),
    )


def _memory(plan: PlanResult) -> HtmlTable:
    memory = plan.memory
    rows = [(name, f"{nbytes / 1e9:.2f} GB") for name, nbytes in memory.rows()]
    copies = "" if memory.kv_copies == 1 else f", each number held {memory.kv_copies:g} times"
    rows.append(("KV per token", f"{memory.kv_bytes_per_token:,.0f} B{copies}"))
    rows.append(("KV of the replica", f"{memory.kv_tokens:,} tokens"))
    return HtmlTable(rows=rows)


def _ms_range(seconds: tuple[float, float]) -> str:
    low, high = (_ms(value) for value in seconds)
    return f"{low} .. {high}"


def _ms(seconds: float) -> str:
    """Three digits, without powers of ten."""
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 100 else rounded(value)
