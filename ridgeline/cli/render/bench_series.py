"""Several runs as tables: each rate's figures, and what the engine or server told meanwhile.

A run from outside is told of by the server's /metrics; one in this process by its own steps. Both
stand under the same names, and beside them what most latency was lost to (`ridgeline diagnose` of
that run says why).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import JustifyMethod
from rich.table import Table

from ridgeline.measure.bench import BenchOptions
from ridgeline.measure.goodput import Goodput
from ridgeline.measure.log import Beside
from ridgeline.measure.metrics import Distribution
from ridgeline.measure.report.pictures import Point
from ridgeline.measure.summary import Summary
from ridgeline.records import RunTrace
from ridgeline.stats import Interval
from ridgeline.workflows.diagnose.diagnose import judged
from ridgeline.workflows.load import server_utilisation
from ridgeline.workflows.load.server_monitor import Seen


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """One of several runs, with what was seen beside it. `log`: where its events were written."""

    options: BenchOptions
    run: RunTrace
    summary: Summary
    seen: Seen
    beside: Beside
    log: Path | None = None


def told(made: Made, device: server_utilisation.Device | None) -> dict[str, str]:
    """What the server said during a run, under short names; without what it did not say."""
    words = _by_steps(made.summary) if made.run.steps else _by_pages(made)
    process = made.seen.machine.process
    if process is not None:
        words["CPU"] = f"{process.cpu_cores:.2f}"
    use = None if device is None else server_utilisation.used(made.run, made.seen.server, device)
    if use is not None:
        words["MFU"] = f"{use.mfu:.1%}"
        words |= {} if use.mbu is None else {"MBU": f"{use.mbu:.1%}"}
    found = judged(made.run, made.beside, made.options.slo).findings
    if found:
        words["lost to"] = f"{found[0].cause} {found[0].gain.mid:.0%}"
    return words


def _by_steps(summary: Summary) -> dict[str, str]:
    used = summary.occupancy
    if used is None:
        return {}
    words = {
        "running": f"{used.mean_runs:.1f}",
        "waiting": f"{used.mean_waiting:.1f}",
        "KV": f"{used.kv_occupancy:.0%}",
    }
    if used.cache_hit_rate is not None:
        words["hits"] = f"{used.cache_hit_rate:.0%}"
    return words | _preempted(used.num_preemptions)


def _by_pages(made: Made) -> dict[str, str]:
    report = made.seen.server
    if report is None:
        return {}
    means, hits = report.means, server_utilisation.hit_share(report)
    words = {name: f"{means[name]:.1f}" for name in ("running", "waiting") if name in means}
    if "kv_used_share" in means:
        words["KV"] = f"{means['kv_used_share']:.0%}"
    if hits is not None:
        words["hits"] = f"{hits:.0%}"
    return words | _preempted(report.counts.get("preemptions", 0.0))


def _preempted(count: float) -> dict[str, str]:
    """Worth a column only where it happened."""
    return {"preempted": f"{count:.0f}"} if count else {}


Rows = Iterable[tuple[str, Mapping[str, str]]]
"""A label, and what is known of it by name."""


def told_table(title: str, rows: Rows) -> Table | None:
    """One row per run, a column per thing that any of them told; None where nobody told any."""
    kept = [(label, words) for label, words in rows]
    names = dict.fromkeys(name for _, words in kept for name in words)
    if not names:
        return None
    table = _table(title, *names)
    for label, words in kept:
        table.add_row(label, *(words.get(name, "–") for name in names))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        side: JustifyMethod = "left" if column == "lost to" else "right"
        table.add_column(column, justify=side, no_wrap=column != "lost to")
    return table


def sweep_table(points: Sequence[Point], knee: float | None) -> Table:
    """One row per rate; times in milliseconds."""
    rows = [(point.rate, cells(point.summary)) for point in sorted(points, key=lambda p: p.rate)]
    for _, figures in rows:
        del figures["tpot p99"]  # a line has 80 characters
    table = _table("req/s", *(rows[0][1] if rows else ()), "")
    for rate, figures in rows:
        table.add_row(f"{rate:.3g}", *figures.values(), "knee" if rate == knee else "")
    return table


def cells(found: Summary) -> dict[str, str]:
    """A run's figures by name; times in milliseconds."""
    return {
        "served/s": f"{found.request_rate:.3g}",
        "tok/s": f"{found.output_tok_s:,.1f}",
        "ttft p50": _ms(found.ttft, 50),
        "ttft p99": _ms(found.ttft, 99),
        "tpot p50": _ms(found.tpot, 50),
        "tpot p99": _ms(found.tpot, 99),
        "met": _met(found.goodput),
    }


def _met(good: Goodput | None) -> str:
    if good is None:
        return "–"
    low, high = 100 * good.attainment_low, 100 * good.attainment_high
    return f"{good.attainment:.0%} [{low:.0f}, {high:.0f}]"


def _ms(values: Distribution | None, q: float) -> str:
    return "–" if values is None else f"{1000 * values.p(q):,.4g}"


def runs_table(found: Mapping[str, Interval], count: int) -> Table:
    """Each figure's mean over the runs with its 95 % Student interval."""
    table = _table(f"over {count} runs", "mean", "95 % interval")
    table.columns[0].justify = "left"
    for name, interval in found.items():
        ends = f"[{interval.low:,.4g}, {interval.high:,.4g}]"
        table.add_row(name, f"{interval.mid:,.4g}", ends)
    return table


def as_json(made: Made, device: server_utilisation.Device | None) -> dict[str, object]:
    """What a result file keeps of each run besides its figures."""
    kept: dict[str, object] = {
        "seed": made.options.seed,
        "log": None if made.log is None else made.log.name,
        "server": msgspec.to_builtins(made.seen.server),
        "machine": msgspec.to_builtins(made.seen.machine),
    }
    use = None if device is None else server_utilisation.used(made.run, made.seen.server, device)
    return kept if use is None else kept | {"use": msgspec.to_builtins(use)}


def log_of(path: Path, number: int) -> Path:
    """`run.jsonl` of several runs: run-1.jsonl, run-2.jsonl, …"""
    return path.with_name(f"{path.stem}-{number}{path.suffix}")
