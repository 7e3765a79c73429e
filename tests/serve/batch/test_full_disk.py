"""A full disk refuses uploads and batches with 507, loses nothing, and may be freed again."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.serve.batch.conftest import with_batches
from tests.serve.batch.helpers import CHAT, jsonl, request
from tests.serve.fake_engine import FakeEngine


async def test_full_disk_is_507_until_it_has_room(tmp_path: Path) -> None:
    app = with_batches(FakeEngine(), tmp_path / "batches.sqlite")
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    form = {"files": {"file": ("in", jsonl(request("a")))}, "data": {"purpose": "batch"}}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as api,
    ):
        database = app.state.batches.store._db._connection
        file_id = (await api.post("/v1/files", **form)).json()["id"]
        database.execute("PRAGMA max_page_count = 1")  # SQLite raises it to the present size
        large = {**form, "files": {"file": ("in", jsonl(*(request(f"{i}") for i in range(900))))}}
        refused = await api.post("/v1/files", **large)
        assert refused.status_code == 507 and "retry-after" in refused.headers
        assert "disk of the batch store is full" in refused.json()["error"]["message"]
        database.execute("PRAGMA max_page_count = 1000000")
        assert (await api.get(f"/v1/files/{file_id}")).status_code == 200
        batch = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        assert (await api.post("/v1/batches", json=batch)).status_code == 200
