"""The console report of `ridgeline bench`: each figure with its bound."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ridgeline.cli.render.console import print_prose
from ridgeline.config.load import BenchOptions, ReportLayout
from ridgeline.measure.metrics.latency import Distribution, by_input_length, by_kind, split
from ridgeline.measure.metrics.run_cost import cost_line
from ridgeline.measure.metrics.step_metrics import LatencyBounds, Occupancy
from ridgeline.measure.metrics.summary import (
    Summary,
    counting_warning,
    describe_counting,
    summarise,
)
from ridgeline.measure.report.bench_page import MonitorTable
from ridgeline.records import RequestTrace, RunTrace
from ridgeline.report.numbers import rounded
from ridgeline.workflows.bench.bench import BenchResult

TITLES = {
    "ttft": "to the first token",
    "tpot": "per output token",
    "itl": "between tokens",
    "e2e": "end to end",
    "visible": "to the first token that is not reasoning",
    "queue": "until it first ran",
    "publish": "from computed to received",
}
SHARES = {
    "user_tok_s": ("output tok/s of one user", 1.0),
    "fluidity": ("tokens in time under the SLO (%)", 100.0),
}
MAX_ERRORS = 3
_LEADING_ZEROS = re.compile(r"(?<=[=>])0+(?=\d)")  # which make names of lengths sort
HELD_BACK_S = 0.010  # the client delayed requests by more than this: show latencies from the send


def print_bench(result: BenchResult, out: Console, layout: ReportLayout = "ridgeline") -> None:
    """Latencies, throughput, engine, what was observed, what bounds the run, and its cost."""
    if layout == "vllm":
        out.print(result.to_vllm_text(), markup=False)
    else:
        is_busy = result.run.machine_load is not None and result.run.machine_load.is_busy
        if is_busy:  # what follows is not about the server
            print_prose(out, f"! {result.diagnosis}", "yellow")
        out.print(bench_tables(result))
        for table in result.tables():
            out.print(observed_table(table))
        if not is_busy:
            print_prose(out, result.diagnosis)
    if result.cost is not None:
        print_prose(out, cost_line(result.cost))


def bench_tables(result: BenchResult) -> Group:
    """The tables of the run's own figures, and its warnings."""
    run, summary = result.run, result.summary
    parts: list[RenderableType] = [
        _heading(run),
        _latencies(summary, result.options, result.bounds),
        _rates(result),
    ]
    if len({request.kind for request in run.requests}) > 1:
        parts.append(_groups(run, result.options, "by kind", by_kind))
    if len(set(map(by_input_length, run.requests))) > 1:
        parts.append(_groups(run, result.options, "by input length", by_input_length))
    if summary.occupancy is not None:
        parts.append(_engine(result, summary.occupancy))
    return Group(*parts, *_warnings(run, summary))


def observed_table(table: MonitorTable) -> Table:
    """Names on the left, figures on the right, remarks behind them."""
    shown = Table(box=None, pad_edge=False, header_style="dim")
    shown.add_column(table.title)
    shown.add_column("", justify="right")
    shown.add_column("", style="dim")
    for row in table.rows:
        shown.add_row(*row)
    return shown


def _heading(run: RunTrace) -> Text:
    parts = (run.target, run.workload, run.arrivals, f"seed {run.seed}", f"{run.duration_s:.1f} s")
    return Text(" · ".join(parts), style="bold")


def _table(*columns: str, notes: str | None = None) -> Table:
    """Names on the left, figures on the right, then an optional column of notes."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    if notes is not None:
        table.add_column(notes, style="dim")
    return table


def _latencies(summary: Summary, options: BenchOptions, bounds: LatencyBounds) -> Table:
    """Milliseconds; with rows that count from the send if the client delayed requests."""
    names = [f"p{q:g}" for q in options.percentiles]
    limits = {
        "ttft": bounds.ttft_s,
        "tpot": bounds.tpot_s,
        "itl": bounds.tpot_s,
        "e2e": bounds.e2e_s,
    }
    bound = ["bound"] if any(limits.values()) else []
    none = [""] * len(bound)
    table = _table("latency (ms)", "mean", *names, *bound, "n")
    for name in options.metrics:
        if name in SHARES:
            continue
        row = _row(getattr(summary, name), options.percentiles)
        limit = [_ms(limits.get(name))] * len(bound)
        table.add_row(f"{name:<4} {TITLES[name]}", *row[:-1], *limit, row[-1])
        sent = getattr(summary, f"{name}_from_send", None)
        if sent is not None and sent != getattr(summary, name) and _held_back(summary):
            row = _row(sent, options.percentiles)
            table.add_row("     … from the send", *row[:-1], *none, row[-1], style="dim")
    for name in options.metrics:
        values = getattr(summary, name) if name in SHARES else None
        if values is not None:
            title, scale = SHARES[name]
            shown = [f"{scale * v:.1f}" for v in (values.mean, *map(values.p, options.percentiles))]
            table.add_row(title, *shown, *none, str(values.count))
    if summary.queue_age is not None:
        age = summary.queue_age
        blanks = [""] * (len(options.percentiles) - 1)
        row = [_ms(age.mean_s), *blanks, f"max {_ms(age.max_s)}"]
        table.add_row("     age of the queue", *row, *none, "", style="dim")
    if summary.queue is not None and "queue" not in options.metrics:
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


def _rates(result: BenchResult) -> Table:
    summary, bounds = result.summary, result.bounds
    table = _table("throughput", "", notes="")
    bound = f"bound {bounds.output_tok_s:,.1f}" if bounds.output_tok_s else ""
    table.add_row("output tok/s", f"{summary.output_tok_s:,.1f}", bound)
    if summary.steady_output_tok_s is not None:
        table.add_row("  … steady", f"{summary.steady_output_tok_s:,.1f}", "", style="dim")
    if not result.in_process and summary.counted_by:
        table.add_row("  … counted by", "", describe_counting(summary), style="dim")
    if result.normalised is not None:
        own = result.normalised
        note = f"as the tokenizer of {own.tokenizer} counts the answers"
        table.add_row("  … normalised", f"{own.output_tok_s:,.1f}", note)
    table.add_row("input tok/s", f"{summary.input_tok_s:,.1f}", "")
    table.add_row("requests/s", rounded(summary.request_rate), _offered(summary))
    table.add_row("completed/min", rounded(60 * summary.request_rate), "")
    if summary.goodput is not None:
        goodput = summary.goodput
        low, high = goodput.attainment_low, goodput.attainment_high
        share = f"{goodput.attainment:.0%} [{low:.0%}, {high:.0%}]"
        table.add_row("goodput req/s", rounded(goodput.goodput_req_s), f"attainment {share}")
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
    return f"offered {rounded(summary.offered_rate)}" if summary.offered_rate else ""


def _groups(
    run: RunTrace, options: BenchOptions, title: str, key: Callable[[RequestTrace], str]
) -> Table:
    names = ("n", "ttft", "tpot", "e2e", "input tok", "output tok", "met")
    table = _table(f"{title} (p50 ms)", *names)
    for kind, part in split(run, key).items():
        summary = summarise(part, options.slo)
        table.add_row(
            _LEADING_ZEROS.sub("", kind),
            str(summary.num_requests),
            *(
                _ms(values.p(50)) if values else "–"
                for values in (summary.ttft, summary.tpot, summary.e2e)
            ),
            f"{summary.input_tokens:,}",
            f"{summary.output_tokens:,}",
            f"{summary.goodput.attainment:.0%}" if summary.goodput else "–",
        )
    return table


def _engine(result: BenchResult, occupancy: Occupancy) -> Table:
    """How the engine was used; MFU and MBU of its busy time, by phase."""
    table = _table("engine", "", notes="")
    for name, value, note in _occupancy_rows(occupancy):
        table.add_row(name, value, note)
    peaks = result.peaks
    if peaks is None:
        return table
    source = f" of {peaks.flops_s / 1e9:,.0f} GFLOP/s {peaks.dtype}"
    source += f", {peaks.bytes_s / 1e9:,.1f} GB/s ({peaks.source})"
    for phase, used in result.utilisation.items():
        table.add_row(
            f"{phase} MFU, MBU",
            f"{used.mfu_busy:.1%}, {used.mbu_busy:.1%}",
            f"{used.num_steps} steps, {used.busy_s:.2f} s busy, bound {used.bound_s:.2f} s"
            + (source if phase == "overall" else ""),
        )
    return table


def _occupancy_rows(occupancy: Occupancy) -> Iterator[tuple[str, str, str]]:
    yield (
        "batch fill",
        f"{occupancy.batch_fill:.0%}",
        f"{occupancy.mean_runs:.1f} runs, {occupancy.mean_tokens:.1f} tokens per step; "
        f"{occupancy.mean_waiting:.1f} waiting",
    )
    peak = f"at most {occupancy.kv_occupancy_max:.0%}"
    yield "KV occupancy", f"{occupancy.kv_occupancy:.0%}", peak
    if occupancy.cache_hit_rate is not None:
        yield "cache hits", f"{occupancy.cache_hit_rate:.0%}", "of the prompt tokens looked up"
    yield "preemptions", str(occupancy.num_preemptions), ""
    yield "wasted slots", f"{occupancy.wasted_slots:.0%}", "empty while requests waited"
    yield "wasted steps", f"{occupancy.wasted_steps:.0%}", "computed tokens that no answer holds"
    planning = f"planning {occupancy.plan_share:.1%} of the wall time"
    yield "engine busy", f"{occupancy.busy_share:.0%}", planning


def _warnings(run: RunTrace, summary: Summary) -> Iterator[Text]:
    """Why the figures may not be about the server, and what went wrong with requests."""
    for reason in summary.validity.reasons:
        yield Text(f"! invalid: {reason}", style="yellow")
    uncounted = counting_warning(summary)
    if uncounted is not None:
        yield Text(f"! {uncounted}", style="yellow")
    unobserved = summary.goodput.misses.get("unobserved", 0) if summary.goodput else 0
    if unobserved:
        text = f"! {unobserved} requests had none of the latencies that the SLO limits"
        yield Text(text, style="yellow")
    errors = Counter(request.error for request in run.requests if request.error)
    for error, count in errors.most_common(MAX_ERRORS):
        yield Text(f"! {count} x {error}", style="red")
