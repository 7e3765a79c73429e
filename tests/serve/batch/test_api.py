"""`/v1/files` and `/v1/batches` over HTTP: uploads, batches, results and charges."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from ridgeline.serve.batch import uploads
from tests.serve.batch.helpers import CHAT, jsonl, request
from tests.serve.fake_engine import ANSWER, FakeEngine

ENDED = ("failed", "completed", "expired", "cancelled")


async def upload(api: httpx.AsyncClient, data: bytes, **fields: str) -> httpx.Response:
    form = {"purpose": "batch", **fields}
    return await api.post("/v1/files", data=form, files={"file": ("in.jsonl", data)})


async def create(api: httpx.AsyncClient, data: bytes, **rest: Any) -> httpx.Response:
    file_id = (await upload(api, data)).json()["id"]
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **rest}
    return await api.post("/v1/batches", json=body)


async def until(api: httpx.AsyncClient, batch_id: str, *statuses: str) -> dict[str, Any]:
    """The batch, once it has one of these statuses."""
    for _ in range(1000):
        batch: dict[str, Any] = (await api.get(f"/v1/batches/{batch_id}")).json()
        if batch["status"] in statuses:
            return batch
        await asyncio.sleep(0.01)
    raise AssertionError(batch)


async def lines(api: httpx.AsyncClient, file_id: str | None) -> dict[str, dict[str, Any]]:
    if file_id is None:
        return {}
    text = (await api.get(f"/v1/files/{file_id}/content")).text
    return {line["custom_id"]: line for line in map(json.loads, text.splitlines())}


async def test_batch_responses_equal_online_ones(
    api: httpx.AsyncClient, engine: FakeEngine
) -> None:
    bad = request("bad")
    bad["body"]["temperature"] = -1
    streamed = request("streamed")
    streamed["body"]["stream"] = True
    reply = await create(api, jsonl(request("a"), bad, request("!fail"), streamed))
    assert reply.json()["status"] == "validating" and reply.json()["object"] == "batch"
    batch = await until(api, reply.json()["id"], *ENDED)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 4, "completed": 1, "failed": 3}
    output = await lines(api, batch["output_file_id"])
    errors = await lines(api, batch["error_file_id"])
    answer = output["a"]["response"]
    assert (set(output), answer["status_code"], output["a"]["error"]) == ({"a"}, 200, None)
    online = await api.post(CHAT, json=request("a")["body"])
    assert answer["body"]["choices"] == online.json()["choices"]
    assert answer["body"]["choices"][0]["message"]["content"] == ANSWER
    assert errors["bad"]["response"]["status_code"] == 400
    assert "temperature" in errors["bad"]["response"]["body"]["error"]["message"]
    assert errors["!fail"]["response"]["status_code"] == 500
    assert errors["streamed"]["error"]["code"] == "invalid_request"
    assert len(engine.in_background) == 2 and len(engine.requests) == 3, (
        "only batch requests are background requests"
    )


async def test_tokens_are_charged_at_half_price(api: httpx.AsyncClient) -> None:
    reply = await create(api, jsonl(request("a"), request("b")))
    batch = await until(api, reply.json()["id"], *ENDED)
    usage, charge = batch["usage"], batch["charge"]
    assert usage["output_tokens"] == 2 * len(ANSWER) and usage["input_tokens"] > 0
    assert charge["price_factor"] == 0.5
    assert charge["output_tokens"] == len(ANSWER)
    assert charge["input_tokens"] == usage["input_tokens"] / 2
    metrics = (await api.get("/metrics")).text
    assert f'ridgeline_batch_charged_tokens_total{{kind="completion"}} {len(ANSWER)}.0' in metrics
    assert 'ridgeline_batches{status="completed"} 1.0' in metrics
    assert "vllm:e2e_request_latency_seconds_count" in metrics
    assert 'vllm:e2e_request_latency_seconds_count{model_name="fake"} 0.0' in metrics


async def test_rejected_file_lists_its_errors(api: httpx.AsyncClient) -> None:
    reply = await create(api, jsonl(request("a"), request("a")) + b"{\n")
    batch = await until(api, reply.json()["id"], *ENDED)
    assert batch["status"] == "failed" and batch["failed_at"] and not batch["output_file_id"]
    listed = [(error["code"], error["line"]) for error in batch["errors"]["data"]]
    assert listed == [("duplicate_custom_id", 2), ("invalid_json_line", 3)]


@pytest.mark.slow
async def test_cancelled_batch_keeps_its_results(api: httpx.AsyncClient) -> None:
    names = ["quick", *(f"!slow-{i}" for i in range(40))]
    batch_id = (await create(api, jsonl(*map(request, names)))).json()["id"]
    while not (await api.get(f"/v1/batches/{batch_id}")).json()["request_counts"]["completed"]:
        await asyncio.sleep(0.01)
    reply = await api.post(f"/v1/batches/{batch_id}/cancel")
    assert reply.json()["status"] == "cancelling"
    assert (await api.post(f"/v1/batches/{batch_id}/cancel")).status_code == 200
    batch = await until(api, batch_id, *ENDED)
    output = await lines(api, batch["output_file_id"])
    errors = await lines(api, batch["error_file_id"])
    assert batch["status"] == "cancelled" and "quick" in output
    assert set(output) | set(errors) == set(names) and not set(output) & set(errors)
    assert {line["error"]["code"] for line in errors.values()} == {"batch_cancelled"}
    reply = await api.post(f"/v1/batches/{batch_id}/cancel")
    assert reply.json()["status"] == "cancelled"


@pytest.mark.slow
async def test_completed_batch_cannot_be_cancelled(api: httpx.AsyncClient) -> None:
    batch_id = (await create(api, jsonl(request("a")))).json()["id"]
    await until(api, batch_id, "completed")
    assert (await api.post(f"/v1/batches/{batch_id}/cancel")).status_code == 409


async def test_files_are_stored_listed_and_deleted(api: httpx.AsyncClient) -> None:
    data = bytes(range(256)) * 9000
    ids = [(await upload(api, data)).json()["id"] for _ in range(3)]
    file = (await api.get(f"/v1/files/{ids[0]}")).json()
    assert (file["bytes"], file["filename"], file["status"]) == (len(data), "in.jsonl", "processed")
    assert (await api.get(f"/v1/files/{ids[0]}/content")).content == data
    page = (await api.get("/v1/files", params={"limit": 2, "purpose": "batch"})).json()
    assert [file["id"] for file in page["data"]] == ids[:0:-1] and page["has_more"]
    page = (await api.get("/v1/files", params={"after": page["last_id"]})).json()
    assert [file["id"] for file in page["data"]] == ids[:1] and not page["has_more"]
    assert (await api.delete(f"/v1/files/{ids[0]}")).json()["deleted"]
    assert (await api.get(f"/v1/files/{ids[0]}")).status_code == 404


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3}}, "output_expires_after"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"endpoint": 3}, "endpoint"),
    ],
)
async def test_bad_batches_are_refused(
    api: httpx.AsyncClient, change: dict[str, Any], param: str | None
) -> None:
    reply = await create(api, jsonl(request("a")), **change)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param


async def test_ignored_fields_are_listed_in_a_header(api: httpx.AsyncClient) -> None:
    reply = await create(api, jsonl(request("a")), colour="red", metadata={"team": "x"})
    assert reply.headers["x-ridgeline-ignored-fields"] == "colour"
    assert reply.json()["metadata"] == {"team": "x"}


@pytest.mark.parametrize("path", ["/v1/files/x", "/v1/files/x/content", "/v1/batches/x"])
async def test_unknown_ids_are_404(api: httpx.AsyncClient, path: str) -> None:
    reply = await api.get(path)
    assert reply.status_code == 404 and reply.json()["error"]["type"] == "NotFoundError"


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=99999999", "order=up"])
async def test_bad_page_parameters_are_refused(api: httpx.AsyncClient, query: str) -> None:
    assert (await api.get(f"/v1/files?{query}")).status_code == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "assistants"}, "purpose"),
        ({"expires_after[seconds]": "10", "expires_after[anchor]": "created_at"}, "expires_after"),
        ({"expires_after[seconds]": "7200"}, "expires_after"),
        ({"note": "x" * 2000}, "note"),
    ],
)
async def test_bad_uploads_are_refused(
    api: httpx.AsyncClient, fields: dict[str, str], param: str
) -> None:
    reply = await upload(api, b"{}", **fields)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param
    assert (await api.get("/v1/files")).json()["data"] == []


BOUNDARY = "--b\r\n"
HEAD = 'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n'


@pytest.mark.parametrize(
    "body",
    [
        "",
        "nonsense",
        BOUNDARY + HEAD + "text without an end",
        BOUNDARY + HEAD + "a\r\n--b\r\n" + HEAD + "b\r\n--b--\r\n",
        BOUNDARY + 'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n',
        BOUNDARY + "x" * 100_000,
        (BOUNDARY + 'Content-Disposition: form-data; name="a"\r\n\r\n\r\n') * 20 + "--b--\r\n",
    ],
)
async def test_malformed_forms_are_refused(api: httpx.AsyncClient, body: str) -> None:
    headers = {"content-type": "multipart/form-data; boundary=b"}
    reply = await api.post("/v1/files", content=body, headers=headers)
    assert reply.status_code == 400, reply.text
    assert (await api.get("/v1/files")).json()["data"] == []


async def test_upload_that_is_not_a_form_is_refused(api: httpx.AsyncClient) -> None:
    for headers in ({}, {"content-type": "application/json"}, {"content-type": "multipart/x"}):
        assert (await api.post("/v1/files", content=b"{}", headers=headers)).status_code == 400


async def test_too_large_file_is_refused(
    api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "MAX_FILE_BYTES", 1000)
    assert (await upload(api, b"x" * 1000)).status_code == 200
    assert (await upload(api, b"x" * 1001)).status_code == 413
    monkeypatch.setattr(uploads, "_FORM_BYTES", 0)
    assert (await upload(api, b"x" * 2000)).status_code == 413
    assert len((await api.get("/v1/files")).json()["data"]) == 1


async def test_file_name_has_no_folders(api: httpx.AsyncClient) -> None:
    form = {"file": ("../../etc/pass\twd", b"{}")}
    reply = await api.post("/v1/files", data={"purpose": "batch"}, files=form)
    assert reply.json()["filename"] == "pass%09wd" or reply.json()["filename"] == "passwd"


async def test_busy_engine_makes_batch_requests_wait(
    api: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ridgeline.errors import EngineUnavailable

    real, refusals = engine.stream, iter([True, True, False, True])

    def stream(*args: Any, **terms: Any) -> Any:
        if next(refusals, False):
            raise EngineUnavailable("full")
        return real(*args, **terms)

    monkeypatch.setattr(engine, "stream", stream)
    reply = await create(api, jsonl(request("a"), request("b")))
    batch = await until(api, reply.json()["id"], *ENDED)
    assert batch["request_counts"]["completed"] == 2
