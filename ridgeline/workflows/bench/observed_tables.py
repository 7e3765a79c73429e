"""What was observed during a run, as tables for the console and the page."""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.measure.metrics.remote_utilisation import RemoteUtilisation
from ridgeline.measure.monitors.energy import EnergyUse
from ridgeline.measure.monitors.gpu import GpuUsage
from ridgeline.measure.monitors.machine_monitor import MachineReport
from ridgeline.measure.monitors.process_usage import ProcessUsage
from ridgeline.measure.monitors.server_metrics import ServerReport
from ridgeline.measure.report.bench_page import MonitorTable
from ridgeline.report.numbers import rounded
from ridgeline.workflows.load.server_monitor import Observed
from ridgeline.workflows.load.server_utilisation import hit_share

Row = tuple[str, str, str]
"""Name, figure, remark."""


def observed_tables(
    observed: Observed,
    use: RemoteUtilisation | None,
    device_name: str,
    *,
    in_process: bool,
    num_tokens: int = 0,
) -> list[MonitorTable]:
    """The server's metrics, the device's utilisation and the machine; tables without rows are
    left out.

    `num_tokens`: output tokens, for the energy per token. An engine in this process reports no
    metrics: its step records are more precise.
    """
    machine = tuple(machine_rows(observed.machine, in_process=in_process, num_tokens=num_tokens))
    tables = [
        MonitorTable(
            "server metrics", () if observed.server is None else tuple(_server(observed.server))
        ),
        MonitorTable("device", tuple(_device(use, device_name))),
        MonitorTable("machine", machine),
    ]
    return [table for table in tables if table.rows]


def _server(report: ServerReport) -> Iterator[Row]:
    means, counts = report.means, report.counts
    yield "server", report.server, f"{report.num_readings} readings of /metrics"
    if "running" in means:
        slots = f"of {means['slots']:.0f} slots, " if "slots" in means else ""
        yield "running", f"{means['running']:.1f}", f"{slots}{means.get('waiting', 0):.1f} waiting"
    if "kv_used_share" in means:
        yield "KV occupancy", f"{means['kv_used_share']:.0%}", "mean of the gauge"
    hits = hit_share(report)
    if hits is not None:
        yield "cache hits", f"{hits:.0%}", "of the prompt tokens looked up"
    if "preemptions" in counts:
        yield "preemptions", f"{counts['preemptions']:.0f}", ""
    if counts.get("num_steps"):
        yield "steps", f"{counts['num_steps']:.0f}", ""
    if "cpu_s" in counts and "rss_bytes" in means:
        memory = f"s of its process, which uses {means['rss_bytes'] / 1e6:,.0f} MB"
        yield "CPU", f"{counts['cpu_s']:.1f}", memory
    for name, text in (("queue_s", "queue"), ("prefill_s", "prefill"), ("decode_s", "decode")):
        if name in report.mean_s:
            yield text, f"{1000 * report.mean_s[name]:.1f}", "ms per request (mean)"


def _device(use: RemoteUtilisation | None, device_name: str) -> Iterator[Row]:
    if use is None:
        return
    mbu = "no MBU: the server does not count steps" if use.mbu is None else f"MBU {use.mbu:.1%}"
    yield "MFU, MBU", f"{use.mfu:.1%}", f"{mbu}, of {device_name}, over the whole run"


def machine_rows(machine: MachineReport, *, in_process: bool, num_tokens: int = 0) -> Iterator[Row]:
    """One row per measured figure, and one per thing that could not be measured."""
    if machine.process is not None:
        yield from _process(machine.process, in_process)
    for gpu in machine.gpus:
        yield from _gpu(f"GPU {gpu.number}", gpu)
    if machine.energy is not None:
        yield from _energy(machine.energy, num_tokens, has_gpus=bool(machine.gpus))
    for note in machine.notes:
        yield "not measured", "–", note


def _energy(energy: EnergyUse, num_tokens: int, *, has_gpus: bool) -> Iterator[Row]:
    """Joules of the whole machine, and per output token."""
    scope = "whole packages, other processes included (RAPL)"
    yield "CPU energy", *_joules(energy.cpu_j, num_tokens, scope, energy.why_no_cpu)
    if energy.gpu_j is not None or has_gpus:
        scope = "all cards (NVML), other programs included"
        yield "GPU energy", *_joules(energy.gpu_j, num_tokens, scope, energy.why_no_gpu)


def _joules(joules: float | None, num_tokens: int, scope: str, why: str) -> tuple[str, str]:
    if joules is None:
        return "–", why
    per_token = f"{rounded(joules / num_tokens)} J per output token; " if num_tokens else ""
    return f"{joules:,.0f}", f"J: {per_token}{scope}"


def _process(process: ProcessUsage, in_process: bool) -> Iterator[Row]:
    owner = "this process, client included" if in_process else "the server's processes"
    if process.num_processes > 1:
        owner += f" ({process.num_processes})"
    yield "CPU cores", f"{process.cpu_cores:.2f}", owner
    if process.taken_share is not None:
        yield (
            "CPU steal/wait",
            f"{process.taken_share:.0%}",
            "of the CPU time demanded: threads waited for a core, or the host took it",
        )
    peak_mb = f"{process.rss_peak_bytes / 1e6:,.0f}"
    yield "memory", f"{process.rss_bytes / 1e6:,.0f}", f"MB, at most {peak_mb}"


def _gpu(label: str, gpu: GpuUsage) -> Iterator[Row]:
    about = gpu.name
    if gpu.memory_busy_share is not None:
        about += f"; its memory was read or written {_percent(gpu.memory_busy_share)} of the time"
    if gpu.is_divided:
        about += "; MIG is on: memory, power and energy are of the whole card"
    yield f"{label} busy", _percent(gpu.busy_share), about
    if gpu.memory_used_bytes is not None and gpu.memory_total_bytes:
        total = f"of {gpu.memory_total_bytes / 1e9:.1f} GB"
        yield f"{label} memory", f"{gpu.memory_used_bytes / 1e9:.1f}", total
    if gpu.power_w is not None:
        limit = "" if gpu.power_limit_w is None else f" of {gpu.power_limit_w:.0f}"
        yield f"{label} power", f"{gpu.power_w:.0f}", f"W{limit}"
    if gpu.clock_share is not None:
        reasons = ", ".join(f"{name} {share:.0%}" for name, share in gpu.slowed_by.items())
        share = _percent(gpu.slowed_share)
        slowed = f"; throttled {share} of the time: {reasons}" if reasons else ""
        yield f"{label} clock", _percent(gpu.clock_share), f"of its maximum{slowed}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
