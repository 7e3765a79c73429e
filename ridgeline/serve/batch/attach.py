"""Add the Batch API to a server: its routes, its metrics, and a worker while the server runs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI

from ridgeline.serve.app import build_routes, include_protected
from ridgeline.serve.batch.executor import InProcessExecutor, fingerprint
from ridgeline.serve.batch.metrics import BatchCollector
from ridgeline.serve.batch.routes import BatchService, router
from ridgeline.serve.batch.schemas import BATCH_ENDPOINTS
from ridgeline.serve.batch.store import BatchStore
from ridgeline.serve.batch.worker import BatchWorker, DailyWindow, WorkerOptions
from ridgeline.serve.service import Service

MAX_FAILURES = 3
"""Consecutive rounds of the batch worker that may fail before the server is unhealthy."""


class BatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`store`: the SQLite file; `max_concurrency`: batch requests at once; `window`: hours in which
    they are started; `max_bytes`: size limit of the store."""

    store: Path
    max_concurrency: int
    window: DailyWindow | None = None
    max_bytes: int = 16 << 30
    poll_s: float = 1.0


def attach_batches(app: FastAPI, batch_app: FastAPI, options: BatchOptions) -> BatchWorker:
    """Give `app` the Batch API; `batch_app` runs the requests during `app`'s lifespan.

    BadInput if the store cannot be opened.
    """
    store = BatchStore(options.store, max_bytes=options.max_bytes)
    service: Service = app.state.service
    batch_service: Service = batch_app.state.service
    service.has_batches = True
    service.metrics.include_output_tokens(lambda: batch_service.metrics.num_output_tokens)
    worker_options = WorkerOptions(
        max_concurrency=options.max_concurrency, poll_s=options.poll_s, window=options.window
    )
    served = fingerprint(batch_service.engine.info)
    executor = InProcessExecutor(
        batch_app,
        service.keys.caller_named,
        served=served,
        max_body_bytes=batch_service.options.max_body_bytes,
    )
    worker = BatchWorker(store, executor, worker_options)
    app.state.batches = BatchService(store, worker, BATCH_ENDPOINTS)
    include_protected(app, router)
    service.metrics.registry.register(BatchCollector(store, worker))
    service.health_checks.append(lambda: _fault(worker))
    name = store_name(options.store)
    service.batch_demand = lambda: f"{name}={worker.wanted_servers:.3f}"
    _run_during_lifespan(app, batch_app, worker, store)
    return worker


def store_name(path: Path) -> str:
    """Names a store, so that servers that share one are not counted twice."""
    place = f"{socket.gethostname()}:{path.resolve()}"
    return hashlib.sha256(place.encode()).hexdigest()[:12]


def _fault(worker: BatchWorker) -> str | None:
    if worker.has_died:
        return "the batch worker has ended"
    return "the batch worker makes no progress" if worker.num_failures >= MAX_FAILURES else None


def _run_during_lifespan(
    app: FastAPI, batch_app: FastAPI, worker: BatchWorker, store: BatchStore
) -> None:
    """Run the worker inside the lifespan that the app already has."""
    inner = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(running: Any) -> AsyncIterator[Any]:
        async with inner(running) as state:
            await asyncio.to_thread(build_routes, batch_app)
            task = asyncio.ensure_future(worker.run())
            try:
                yield state
            finally:
                worker.stop()
                await task
                store.close()

    app.router.lifespan_context = lifespan
