"""An app with the Batch API over the fake engine, inside its lifespan."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from ridgeline.serve.app import create_app
from ridgeline.serve.batch.attach import BatchOptions, attach_batches
from ridgeline.serve.batch.executor import background_engine
from tests.serve.fake_engine import FakeEngine


def with_batches(engine: FakeEngine, store: Path) -> FastAPI:
    """The app as `ridgeline serve --batch-store` builds it."""
    app = create_app(engine)
    options = BatchOptions(store=store, max_concurrency=4, poll_s=0.01)
    attach_batches(app, create_app(background_engine(engine)), options)
    return app


@pytest.fixture
async def api(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = with_batches(engine, tmp_path / "batches.sqlite")
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
    ):
        yield client
