"""Observe a server during a run: its /metrics, its processes on this machine, and the GPUs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import msgspec

from ridgeline.measure.client.http_target import base_url, connection_pool
from ridgeline.measure.client.load_client import OnStart
from ridgeline.measure.monitors.energy import Rapl
from ridgeline.measure.monitors.gpu import NoGpus, open_gpus
from ridgeline.measure.monitors.machine_load import LoadMeter
from ridgeline.measure.monitors.machine_monitor import MachineMonitor, MachineReport
from ridgeline.measure.monitors.process_usage import is_local, listening_process
from ridgeline.measure.monitors.server_metrics import ServerMonitor, ServerReport
from ridgeline.records import RunTrace

NOT_LOCAL = "the server is not on this machine: its processes and GPUs cannot be observed"


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What was observed during a run. `server` is None without a known /metrics."""

    server: ServerReport | None = None
    machine: MachineReport = MachineReport()


async def observe_run(
    run: Callable[[OnStart], Awaitable[RunTrace]], url: str | None, api_key: str | None = None
) -> tuple[RunTrace, Observed]:
    """Run, and observe from the end of the warm-up on. `url` None: the engine in this process."""
    scraper = None if url is None else metrics_scraper(url, api_key)
    watch = await asyncio.to_thread(watch_machine, url)

    async def begin() -> None:
        await asyncio.gather(
            *(monitor.begin() for monitor in (scraper, watch) if monitor is not None)
        )

    meters: list[LoadMeter] = []

    async def begin_all() -> None:
        await begin()
        meters.append(LoadMeter(watch.pids))

    async with AsyncExitStack() as stack:
        if scraper is not None:
            await stack.enter_async_context(scraper)
        await stack.enter_async_context(watch)
        trace = await run(begin_all)
        load = meters[-1].read() if meters else None
    trace = msgspec.structs.replace(trace, machine_load=load)
    return trace, Observed(server=scraper.report() if scraper else None, machine=watch.report())


def metrics_scraper(url: str, api_key: str | None) -> ServerMonitor:
    """Polls the server's /metrics while its context is open."""
    wire, prefix = connection_pool(url, api_key)
    return ServerMonitor(wire, f"{prefix}/metrics")


def watch_machine(url: str | None) -> MachineMonitor:
    """Watches this process, or the server's processes if they are on this machine."""
    if url is None:
        return MachineMonitor(os.getpid(), open_gpus(), rapl=Rapl())
    address = urlsplit(base_url(url))
    if not is_local(address.hostname or ""):
        return MachineMonitor(None, NoGpus(""), why_no_process=NOT_LOCAL)
    port = address.port or (443 if address.scheme == "https" else 80)
    why = f"no process found on port {port} (it may belong to another user or a container)"
    return MachineMonitor(listening_process(port), open_gpus(), why_no_process=why, rapl=Rapl())
