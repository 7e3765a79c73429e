"""Putting the Batch API on a server: routes, metrics, and the worker for as long as it runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette

from ridgeline.serve.batch.executor import InProcess
from ridgeline.serve.batch.records import STATUSES, Batch
from ridgeline.serve.batch.routes import BatchRoutes
from ridgeline.serve.batch.store import Store
from ridgeline.serve.batch.worker import Window, Worker, WorkerOptions
from ridgeline.serve.metrics.registry import Metrics
from ridgeline.serve.openapi.batch import ENDPOINTS
from ridgeline.serve.service import Service


class BatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`store`: the SQLite file; `most`: lines at once; `window`: hours in which they are begun;
    `max_bytes`: what the store may hold."""

    store: Path
    most: int
    window: Window | None = None
    max_bytes: int = 16 << 30
    beat_s: float = 1.0


def attach(
    app: Starlette, line_app: Starlette, options: BatchOptions, registry: CollectorRegistry
) -> Worker:
    """Give `app` the routes; lines are answered by `line_app` while `app`'s lifespan lasts.

    BadInput where the store cannot be opened.
    """
    store = Store(options.store, max_bytes=options.max_bytes)
    service: Service = app.state.service
    line_metrics: Metrics = line_app.state.service.metrics
    service.metrics.count_beside(lambda: line_metrics.num_tokens)
    settings = WorkerOptions(most=options.most, beat_s=options.beat_s, window=options.window)
    worker = Worker(store, InProcess(line_app, service.ring.named), settings)
    BatchRoutes(store, worker, endpoints_of(line_app)).add_to(app)
    registry.register(BatchCollector(store, worker))
    _live_with(app, worker, store)
    return worker


def endpoints_of(app: Starlette) -> tuple[str, ...]:
    """What a line may be sent to: the generating routes that the app has."""
    paths = {getattr(route, "path", None) for route in app.routes}
    return tuple(path for path in ENDPOINTS if path in paths)


def _live_with(app: Starlette, worker: Worker, store: Store) -> None:
    """Run the worker inside whatever lifespan the app has already."""
    inner = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(running: Starlette) -> AsyncIterator[Any]:
        async with inner(running) as state:
            task = asyncio.ensure_future(worker.run())
            try:
                yield state
            finally:
                worker.stop()
                await task
                store.close()

    app.router.lifespan_context = lifespan


class BatchCollector(Collector):
    """`ridgeline_batch_*`: read from the store at scrape time, so that a restart loses no count."""

    def __init__(self, store: Store, worker: Worker) -> None:
        self._store, self._worker = store, worker

    def collect(self) -> Iterable[Metric]:
        batches = self._store.having(*STATUSES)
        levels = GaugeMetricFamily("ridgeline_batches", "Batches by state.", labels=["status"])
        for status in STATUSES:
            levels.add_metric([status], sum(batch.status == status for batch in batches))
        yield levels
        yield _gauge("lines_running", "Lines that are being answered.", self._worker.num_running)
        open_lines = sum(b.total - b.completed - b.failed for b in batches)
        yield _gauge("store_bytes", "What the store holds on the disk.", self._store.used_bytes())
        yield _gauge("lines_open", "Lines that are not answered yet.", open_lines)
        lines = CounterMetricFamily("ridgeline_batch_lines", "Settled lines.", labels=["result"])
        lines.add_metric(["succeeded"], sum(batch.completed for batch in batches))
        lines.add_metric(["failed"], sum(batch.failed for batch in batches))
        yield lines
        yield from _tokens(batches)


def _tokens(batches: Iterable[Batch]) -> Iterable[Metric]:
    used = CounterMetricFamily("ridgeline_batch_tokens", "Tokens of lines.", labels=["kind"])
    charged = CounterMetricFamily(
        "ridgeline_batch_charged_tokens", "The same at the price of online ones.", labels=["kind"]
    )
    for kind in ("prompt", "completion"):
        counts = [(getattr(batch, f"{kind}_tokens"), batch.price_factor) for batch in batches]
        used.add_metric([kind], sum(count for count, _ in counts))
        charged.add_metric([kind], sum(count * factor for count, factor in counts))
    yield used
    yield charged


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"ridgeline_batch_{name}", text, value=value)
