"""What is seen beside a run: the server's /metrics, its processes here, and this machine's GPUs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import msgspec

from ridgeline.measure.client import OnStart
from ridgeline.measure.http import base_url, wire_to
from ridgeline.measure.server.gpu import GpuUse, NoGpus, open_gpus
from ridgeline.measure.server.machine import MachineReport, MachineWatch
from ridgeline.measure.server.process import ProcessUse, is_here, listener
from ridgeline.measure.server.scrape import Scraper, ServerReport
from ridgeline.records import RunTrace

ELSEWHERE = "not on this machine: its processes and GPUs are not seen from here"


Row = tuple[str, str, str]
"""Name, figure, remark."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """`server` None: no /metrics that anybody knows."""

    server: ServerReport | None = None
    machine: MachineReport = MachineReport()


async def watched(
    run: Callable[[OnStart], Awaitable[RunTrace]], url: str | None, api_key: str | None = None
) -> tuple[RunTrace, Seen]:
    """A run, and what was seen since its warm-up. `url` None: the engine is in this process."""
    scraper = None if url is None else scraper_of(url, api_key)
    watch = await asyncio.to_thread(machine_watch, url)

    async def begin() -> None:
        await asyncio.gather(*(each.begin() for each in (scraper, watch) if each is not None))

    async with AsyncExitStack() as stack:
        if scraper is not None:
            await stack.enter_async_context(scraper)
        await stack.enter_async_context(watch)
        done = await run(begin)
    return done, Seen(server=scraper.report() if scraper else None, machine=watch.report())


def scraper_of(url: str, api_key: str | None) -> Scraper:
    """A watcher of the server's /metrics; use it around a run."""
    wire, prefix = wire_to(url, api_key)
    return Scraper(wire, f"{prefix}/metrics")


def machine_watch(url: str | None) -> MachineWatch:
    """Of this process; of the server's processes where it is on this machine; else of nothing."""
    if url is None:
        return MachineWatch(os.getpid(), open_gpus())
    address = urlsplit(base_url(url))
    if not is_here(address.hostname or ""):
        return MachineWatch(None, NoGpus(""), why_no_process=ELSEWHERE)
    port = address.port or (443 if address.scheme == "https" else 80)
    why = f"whose port {port} is cannot be seen (another user's, or a container's)"
    return MachineWatch(listener(port), open_gpus(), why_no_process=why)


def machine_rows(machine: MachineReport, *, in_process: bool) -> Iterator[Row]:
    """One row per thing that was measured of the machine, and one per thing that was not."""
    if machine.process is not None:
        yield from _process(machine.process, in_process)
    for number, gpu in enumerate(machine.gpus):
        yield from _gpu(f"GPU {number}", gpu)
    for note in machine.notes:
        yield "not measured", "–", note


def _process(used: ProcessUse, in_process: bool) -> Iterator[Row]:
    whose = "this process, client included" if in_process else "the server's processes"
    if used.num_processes > 1:
        whose += f" ({used.num_processes})"
    yield "CPU cores", f"{used.cpu_cores:.2f}", whose
    if used.taken_share is not None:
        yield (
            "CPU not had",
            f"{used.taken_share:.0%}",
            "of what was asked for: threads waited for a core, or the host took it",
        )
    yield "memory", f"{used.rss_bytes / 1e6:,.0f}", f"MB, at most {used.rss_peak_bytes / 1e6:,.0f}"


def _gpu(label: str, gpu: GpuUse) -> Iterator[Row]:
    yield (
        f"{label} busy",
        _share(gpu.busy_share),
        f"{gpu.name}; of the time a kernel ran, {_share(gpu.memory_busy_share)} memory was used",
    )
    if gpu.memory_used_bytes is not None and gpu.memory_total_bytes:
        total = f"of {gpu.memory_total_bytes / 1e9:.1f} GB"
        yield f"{label} memory", f"{gpu.memory_used_bytes / 1e9:.1f}", total
    if gpu.power_w is not None:
        limit = "" if gpu.power_limit_w is None else f" of {gpu.power_limit_w:.0f}"
        yield f"{label} power", f"{gpu.power_w:.0f}", f"W{limit}"
    if gpu.clock_share is not None:
        reasons = ", ".join(f"{name} {share:.0%}" for name, share in gpu.slowed_by.items())
        slowed = f"; slowed down {gpu.slowed_share:.0%} of the time: {reasons}" if reasons else ""
        yield f"{label} clock", _share(gpu.clock_share), f"of its highest{slowed}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
