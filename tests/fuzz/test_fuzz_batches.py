"""Mutated uploads, batch bodies, ids and queries: a success or a refusal with a reason."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.fuzz.mutate import mutate_bytes, mutate_json, mutate_text, odd_value
from tests.fuzz.targets import dump
from tests.fuzz.test_fuzz_http import check_error
from tests.serve.batch.conftest import with_batches
from tests.serve.batch.helpers import jsonl, request
from tests.serve.fake_engine import FakeEngine

NUM_RUNS = int(os.environ.get("FUZZ_RUNS", "60"))
FIRST_RUN = int(os.environ.get("FUZZ_SEED", "0"))
ENDED = ("completed", "failed", "expired", "cancelled")
BOUNDARY = "xyz"
LINES = jsonl(request("a"), request("b"), request("c"))
FORM = (
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n'
    "Content-Type: application/jsonl\r\n\r\n"
).encode() + LINES + f"\r\n--{BOUNDARY}--\r\n".encode()  # fmt: skip
FORM_TYPE = f"multipart/form-data; boundary={BOUNDARY}"
ODD_TYPES = (
    FORM_TYPE, FORM_TYPE, FORM_TYPE, "multipart/form-data", "multipart/form-data; boundary=",
    f'multipart/form-data; boundary="{BOUNDARY}"; charset=utf-7', "application/json",
    f"multipart/form-data; boundary={'b' * 300}", "text/plain",
    f"multipart/mixed; boundary={BOUNDARY}",
)  # fmt: skip


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = with_batches(FakeEngine(), tmp_path / "batches.sqlite")
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield client


def check(response: httpx.Response, sent: object) -> None:
    assert response.status_code in (200, 400, 404, 405, 409, 413, 415), (
        f"{response.status_code} {response.text[:300]} for {sent!r:.600}"
    )
    if response.status_code != 200:
        check_error(response.request.url.path, response.json())


async def upload(api: httpx.AsyncClient, data: bytes) -> str:
    files = {"file": ("in.jsonl", data, "application/jsonl")}
    reply = await api.post("/v1/files", files=files, data={"purpose": "batch"})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


async def test_mutated_uploads(api: httpx.AsyncClient) -> None:
    for number in range(FIRST_RUN, FIRST_RUN + NUM_RUNS):
        rng = random.Random(f"upload/{number}")
        body, kind = mutate_bytes(rng, FORM), rng.choice(ODD_TYPES)
        reply = await api.post("/v1/files", content=body, headers={"content-type": kind})
        check(reply, (kind, body))


async def test_mutated_batches(api: httpx.AsyncClient) -> None:
    body = {
        "input_file_id": await upload(api, LINES),
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "metadata": {"a": "b"},
    }
    assert (await api.post("/v1/batches", json=body)).status_code == 200
    pool: list[Any] = [*body.values()]
    for number in range(FIRST_RUN, FIRST_RUN + NUM_RUNS):
        rng = random.Random(f"batch/{number}")
        sent = dump(mutate_json(rng, body, pool))
        headers = {"content-type": "application/json"}
        check(await api.post("/v1/batches", content=sent, headers=headers), sent)


async def test_mutated_input_files_end_their_batch(api: httpx.AsyncClient) -> None:
    """Whatever a file holds, its batch ends, and the worker goes on."""
    for number in range(FIRST_RUN, FIRST_RUN + max(4, NUM_RUNS // 6)):
        rng = random.Random(f"file/{number}")
        lines = [mutate_json(rng, request(name)) if rng.random() < 0.5 else request(name)
                 for name in "abc"]  # fmt: skip
        data = b"".join(dump(line) + b"\n" for line in lines)
        data = mutate_bytes(rng, data) if rng.random() < 0.5 else data
        body = {
            "input_file_id": await upload(api, data or b"\n"),
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        reply = await api.post("/v1/batches", json=body)
        check(reply, data)
        if reply.status_code != 200:
            continue
        path = f"/v1/batches/{reply.json()['id']}"
        for _ in range(500):
            job = (await api.get(path)).json()
            if job["status"] in ENDED:
                break
            await asyncio.sleep(0.01)
        assert job["status"] in ENDED, (job, data[:600])
        counts = job["request_counts"]
        assert counts["completed"] + counts["failed"] == counts["total"], job


async def test_odd_ids_and_queries(api: httpx.AsyncClient) -> None:
    file_id = await upload(api, LINES)
    for number in range(FIRST_RUN, FIRST_RUN + max(4, NUM_RUNS // 4)):
        rng = random.Random(f"id/{number}")
        odd = quote(mutate_text(rng, file_id).encode("utf-8", "surrogatepass"), safe="")[:400]
        query = {
            name: str(odd_value(rng))[:200].encode("utf-8", "replace").decode()
            for name in ("limit", "after", "order", "purpose")
            if rng.random() < 0.5
        }
        for method, path in (
            ("GET", f"/v1/files/{odd}"), ("GET", f"/v1/files/{odd}/content"),
            ("DELETE", f"/v1/files/{odd}x"), ("GET", f"/v1/batches/{odd}"),
            ("POST", f"/v1/batches/{odd}/cancel"), ("GET", "/v1/files"), ("GET", "/v1/batches"),
        ):  # fmt: skip
            reply = await api.request(method, path, params=query)
            if reply.status_code not in (307, 308):  # an odd id that normalises to another path
                check(reply, (method, path, query))
