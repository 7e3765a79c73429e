"""The figures of one run of a series as short texts by name, for the console and the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.measure.metrics.goodput import Goodput
from ridgeline.measure.metrics.latency import Distribution
from ridgeline.measure.metrics.summary import Summary
from ridgeline.measure.monitors.server_metrics import ServerReport
from ridgeline.report.numbers import rounded
from ridgeline.workflows.load.server_utilisation import hit_share

if TYPE_CHECKING:
    from ridgeline.workflows.bench.bench_series import SeriesRun


def figure_cells(summary: Summary) -> dict[str, str]:
    """Throughput, latencies in milliseconds, and attainment."""
    return {
        "served/s": rounded(summary.request_rate),
        "tok/s": f"{summary.output_tok_s:,.1f}",
        "ttft p50": _ms(summary.ttft, 50),
        "ttft p99": _ms(summary.ttft, 99),
        "tpot p50": _ms(summary.tpot, 50),
        "tpot p99": _ms(summary.tpot, 99),
        "met": _attainment(summary.goodput),
    }


def observed_cells(run: SeriesRun) -> dict[str, str]:
    """What the engine or the server reported during the run; without what is unknown."""
    cells = _step_cells(run.summary) if run.run.steps else _server_cells(run.observed.server)
    process = run.observed.machine.process
    if process is not None:
        cells["CPU"] = f"{process.cpu_cores:.2f}"
    if run.use is not None:
        cells["MFU"] = f"{run.use.mfu:.1%}"
        cells |= {} if run.use.mbu is None else {"MBU": f"{run.use.mbu:.1%}"}
    if run.lost_to is not None:
        cause, share = run.lost_to
        cells["lost to"] = f"{cause} {share:.0%}"
    return cells


def _step_cells(summary: Summary) -> dict[str, str]:
    occupancy = summary.occupancy
    if occupancy is None:
        return {}
    cells = {
        "running": f"{occupancy.mean_runs:.1f}",
        "waiting": f"{occupancy.mean_waiting:.1f}",
        "KV": f"{occupancy.kv_occupancy:.0%}",
    }
    if occupancy.cache_hit_rate is not None:
        cells["hits"] = f"{occupancy.cache_hit_rate:.0%}"
    return cells | _preemptions(occupancy.num_preemptions)


def _server_cells(report: ServerReport | None) -> dict[str, str]:
    if report is None:
        return {}
    means, hits = report.means, hit_share(report)
    cells = {name: f"{means[name]:.1f}" for name in ("running", "waiting") if name in means}
    if "kv_used_share" in means:
        cells["KV"] = f"{means['kv_used_share']:.0%}"
    if hits is not None:
        cells["hits"] = f"{hits:.0%}"
    return cells | _preemptions(report.counts.get("preemptions", 0.0))


def _preemptions(count: float) -> dict[str, str]:
    """A column of its own only if there were any."""
    return {"preempted": f"{count:.0f}"} if count else {}


def _attainment(goodput: Goodput | None) -> str:
    if goodput is None:
        return "–"
    low, high = 100 * goodput.attainment_low, 100 * goodput.attainment_high
    return f"{goodput.attainment:.0%} [{low:.0f}, {high:.0f}]"


def _ms(values: Distribution | None, q: float) -> str:
    return "–" if values is None else rounded(1000 * values.p(q), 4)
