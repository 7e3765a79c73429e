"""The tables of `ridgeline bench`: each figure, and beside it the bound that it is measured
against.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ridgeline.measure.bench import BenchOptions
from ridgeline.measure.metrics import Distribution, by_kind, split
from ridgeline.measure.steps import LatencyBounds, latency_bounds, utilisation
from ridgeline.measure.summary import Summary, summarise
from ridgeline.records import RunTrace
from ridgeline.roofline import Peaks, PriceStep

TITLES = {
    "ttft": "to the first token",
    "tpot": "per output token",
    "itl": "between tokens",
    "e2e": "end to end",
}
MAX_ERRORS = 3
HELD_BACK_S = 0.010
NO_BOUNDS = LatencyBounds(ttft_s=None, tpot_s=None, e2e_s=None, output_tok_s=None)


class Physics(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is held against: the arithmetic of a step, and the machine's ceilings."""

    price: PriceStep
    peaks: Peaks


def render(
    run: RunTrace, summary: Summary, options: BenchOptions, physics: Physics | None
) -> Group:
    """Everything that the terminal shows but the diagnosis."""
    found = latency_bounds(run, physics.price, physics.peaks) if physics else NO_BOUNDS
    parts: list[RenderableType] = [
        _heading(run),
        _latencies(summary, options, found),
        _rates(summary, found),
    ]
    if len({request.kind for request in run.requests}) > 1:
        parts.append(_kinds(run, options))
    if summary.occupancy is not None:
        parts.append(_engine(run, summary, physics))
    return Group(*parts, *_warnings(run, summary))


def _heading(run: RunTrace) -> Text:
    parts = (run.target, run.workload, run.arrivals, f"seed {run.seed}", f"{run.duration_s:.1f} s")
    return Text(" · ".join(parts), style="bold")


def _table(*columns: str, notes: str | None = None) -> Table:
    """Names on the left, figures on the right, and behind them perhaps a column of notes."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    if notes is not None:
        table.add_column(notes, style="dim")
    return table


def _latencies(summary: Summary, options: BenchOptions, found: LatencyBounds) -> Table:
    """Milliseconds; the sent rows appear where the client had to hold requests back."""
    names = [f"p{q:g}" for q in options.percentiles]
    limits = {"ttft": found.ttft_s, "tpot": found.tpot_s, "itl": found.tpot_s, "e2e": found.e2e_s}
    bound = ["bound"] if any(limits.values()) else []
    none = [""] * len(bound)
    table = _table("latency (ms)", "mean", *names, *bound, "n")
    for name in options.metrics:
        row = _row(getattr(summary, name), options.percentiles)
        limit = [_ms(limits[name])] * len(bound)
        table.add_row(f"{name:<5}{TITLES[name]}", *row[:-1], *limit, row[-1])
        sent = getattr(summary, f"{name}_from_send", None)
        if sent is not None and sent != getattr(summary, name) and _held_back(summary):
            row = _row(sent, options.percentiles)
            table.add_row("     … from the send", *row[:-1], *none, row[-1], style="dim")
    if summary.queue is not None:
        row = _row(summary.queue, options.percentiles)
        table.add_row("     until it first ran", *row[:-1], *none, row[-1], style="dim")
    return table


def _held_back(summary: Summary) -> bool:
    return summary.client_queue is not None and summary.client_queue.p(99) > HELD_BACK_S


def _row(values: Distribution | None, percentiles: tuple[float, ...]) -> list[str]:
    """Mean, percentiles, count."""
    if values is None:
        return ["–"] * (1 + len(percentiles)) + ["0"]
    return [_ms(values.mean), *(_ms(values.p(q)) for q in percentiles), str(values.count)]


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1000:.{2 if seconds < 0.01 else 1}f}"


def _rates(summary: Summary, found: LatencyBounds) -> Table:
    table = _table("throughput", "", notes="")
    bound = f"bound {found.output_tok_s:,.1f}" if found.output_tok_s else ""
    table.add_row("output tok/s", f"{summary.output_tok_s:,.1f}", bound)
    if summary.steady_output_tok_s is not None:
        table.add_row("  … steady", f"{summary.steady_output_tok_s:,.1f}", "", style="dim")
    table.add_row("input tok/s", f"{summary.input_tok_s:,.1f}", "")
    table.add_row("requests/s", f"{summary.request_rate:.3g}", _offered(summary))
    if summary.goodput is not None:
        good = summary.goodput
        share = f"{good.attainment:.0%} [{good.attainment_low:.0%}, {good.attainment_high:.0%}]"
        table.add_row("goodput req/s", f"{good.goodput_req_s:.3g}", f"attainment {share}")
    counts = (
        ("failed", summary.num_failed),
        ("timed out", summary.num_timeout),
        ("cancelled", summary.num_cancelled),
    )
    lost = "".join(f", {count} {name}" for name, count in counts if count)
    table.add_row(
        "requests", f"{summary.num_ok} ok{lost}", f"peak {summary.peak_concurrency} at once"
    )
    return table


def _offered(summary: Summary) -> str:
    return f"offered {summary.offered_rate:.3g}" if summary.offered_rate else ""


def _kinds(run: RunTrace, options: BenchOptions) -> Table:
    table = _table("by kind (p50 ms)", "n", "ttft", "tpot", "e2e", "input tok", "output tok", "met")
    for kind, part in split(run, by_kind).items():
        found = summarise(part, options.slo)
        table.add_row(
            kind,
            str(found.num_requests),
            *(
                _ms(values.p(50)) if values else "–"
                for values in (found.ttft, found.tpot, found.e2e)
            ),
            f"{found.input_tokens:,}",
            f"{found.output_tokens:,}",
            f"{found.goodput.attainment:.0%}" if found.goodput else "–",
        )
    return table


def _engine(run: RunTrace, summary: Summary, physics: Physics | None) -> Table:
    """How the engine was used; MFU and MBU of its busy time, by phase."""
    table = _table("engine", "", notes="")
    for name, value, note in _occupancy_rows(summary):
        table.add_row(name, value, note)
    if physics is None:
        return table
    source = f" of {physics.peaks.flops_s / 1e9:,.0f} GFLOP/s {physics.peaks.dtype}"
    source += f", {physics.peaks.bytes_s / 1e9:,.1f} GB/s ({physics.peaks.source})"
    for phase, used in utilisation(run, physics.price, physics.peaks).items():
        table.add_row(
            f"{phase} MFU, MBU",
            f"{used.mfu_busy:.1%}, {used.mbu_busy:.1%}",
            f"{used.num_steps} steps, {used.busy_s:.2f} s busy, bound {used.bound_s:.2f} s"
            + (source if phase == "overall" else ""),
        )
    return table


def _occupancy_rows(summary: Summary) -> Iterator[tuple[str, str, str]]:
    used = summary.occupancy
    if used is None:
        return
    yield (
        "batch fill",
        f"{used.batch_fill:.0%}",
        f"{used.mean_runs:.1f} runs, "
        + (f"{used.mean_tokens:.1f} tokens per step; {used.mean_waiting:.1f} waiting"),
    )
    yield "KV occupancy", f"{used.kv_occupancy:.0%}", f"at most {used.kv_occupancy_max:.0%}"
    if used.cache_hit_rate is not None:
        yield "cache hits", f"{used.cache_hit_rate:.0%}", "of the prompt tokens looked up"
    yield "preemptions", str(used.num_preemptions), ""
    yield "engine busy", f"{used.busy_share:.0%}", f"planning {used.plan_share:.1%} of the wall"


def _warnings(run: RunTrace, summary: Summary) -> Iterator[Text]:
    """Why the figures may not be about the server, and what went wrong with requests."""
    for reason in summary.validity.reasons:
        yield Text(f"! invalid: {reason}", style="yellow")
    unseen = summary.goodput.misses.get("unobserved", 0) if summary.goodput else 0
    if unseen:
        yield Text(f"! {unseen} requests showed none of the promised latencies", style="yellow")
    errors = Counter(request.error for request in run.requests if request.error)
    for error, count in errors.most_common(MAX_ERRORS):
        yield Text(f"! {count} x {error}", style="red")
