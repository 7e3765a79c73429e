"""schemathesis over the generated OpenAPI document: no 5xx, and no response outside the document.

A few examples run with the suite, over a fake engine that never fails by itself, so that a 5xx is
the server's. `scripts/fuzz_api.py` runs all phases with 200 examples per operation against the real
engine.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from ridgeline.config.server import ServerOptions
from ridgeline.serve.app import create_admin_app, create_app
from tests.serve.batch.conftest import with_batches
from tests.serve.fake_engine import FakeEngine

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("RIDGELINE_SCHEMATHESIS_EXAMPLES", "3"))
OPTIONS = ServerOptions(enable_auto_tool_choice=True, tool_call_parser="hermes")
APP = create_app(FakeEngine(), OPTIONS)
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
schema = schemathesis.openapi.from_asgi("/openapi.json", APP, headers={"host": "localhost"})


@schema.parametrize()
@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
def test_responses_fit_the_document(case: schemathesis.Case) -> None:
    response = case.call(headers={"host": "localhost"})
    case.validate_response(response, checks=CHECKS)


def operations(document: dict[str, Any]) -> set[tuple[str, str]]:
    return {(method.upper(), path) for path, item in document["paths"].items() for method in item}


PUBLIC = {
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/v1/responses"),
    ("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens"), ("POST", "/v1/embeddings"),
    ("POST", "/v1/rerank"), ("POST", "/v1/score"), ("POST", "/invocations"),
    ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"), ("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"),
    ("GET", "/ready"), ("GET", "/version"), ("GET", "/metrics"), ("GET", "/openapi.json"),
    ("GET", "/"), ("GET", "/ridgeline/config"), ("POST", "/v1/cache/warm"),
    ("POST", "/v1/cache/forget"), ("POST", "/v1/responses/input_tokens"),
}  # fmt: skip
BATCH = {
    ("POST", "/v1/files"), ("GET", "/v1/files"), ("GET", "/v1/files/{file_id}"),
    ("DELETE", "/v1/files/{file_id}"), ("GET", "/v1/files/{file_id}/content"),
    ("POST", "/v1/batches"), ("GET", "/v1/batches"), ("GET", "/v1/batches/{batch_id}"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
}  # fmt: skip
ADMIN = {
    ("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/ready"),
    ("GET", "/version"), ("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/admin/state"),
    ("POST", "/admin/drain"), ("POST", "/admin/abort/{id}"),
}  # fmt: skip


def test_documents_have_every_operation(tmp_path: Path) -> None:
    with_store = with_batches(FakeEngine(), tmp_path / "batches.sqlite")
    assert operations(APP.openapi()) == PUBLIC
    assert operations(with_store.openapi()) == PUBLIC | BATCH
    assert operations(create_admin_app(APP.state.service).openapi()) == ADMIN


async def test_served_document_is_the_apps(tmp_path: Path) -> None:
    for app in (APP, with_batches(FakeEngine(), tmp_path / "b.sqlite")):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            assert (await http.get("/openapi.json")).json() == app.openapi()


def test_keys_are_documented_where_they_are_required() -> None:
    locked = create_app(FakeEngine(), ServerOptions(api_key="sesame")).openapi()
    for path, item in locked["paths"].items():
        for operation in item.values():
            is_open = path in ("/", "/health", "/ping", "/ready")
            assert bool(operation.get("security")) is not is_open
            assert ("401" in operation["responses"]) is not is_open
    assert set(locked["components"]["securitySchemes"]) == {"bearer", "api_key"}
    assert "securitySchemes" not in APP.openapi()["components"]


def documents(tmp_path: Path) -> list[dict[str, Any]]:
    public = with_batches(FakeEngine(), tmp_path / "batches.sqlite")
    return [public.openapi(), create_admin_app(public.state.service).openapi()]


def test_references_resolve_and_every_error_has_a_body(tmp_path: Path) -> None:
    for document in documents(tmp_path):
        components = document["components"]
        for kind, name in re.findall(r'"#/components/(\w+)/([^"]+)"', json.dumps(document)):
            assert name in components[kind], name
        listed = [o for item in document["paths"].values() for o in item.values()]
        ids = [operation["operationId"] for operation in listed]
        assert len(ids) == len(set(ids))
        for operation in listed:
            assert operation["summary"] and operation["tags"]
            for status, response in operation["responses"].items():
                if status != "200":
                    assert response["content"]["application/json"]["schema"]
                has_retry = "Retry-After" in response.get("headers", {})
                assert has_retry == (status in ("429", "503", "507"))


def test_linked_operations_exist(tmp_path: Path) -> None:
    document = documents(tmp_path)[0]
    listed = [o for item in document["paths"].values() for o in item.values()]
    ids = {operation["operationId"] for operation in listed}
    links = [
        link["operationId"]
        for operation in listed
        for response in operation["responses"].values()
        for link in response.get("links", {}).values()
    ]
    assert links and set(links) <= ids


CHAT_BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "model": "fake"}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": "hi", "max_tokens": 4, "logprobs": 1, "return_token_ids": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/chat/completions": {**CHAT_BODY, "logprobs": True, "top_logprobs": 1, "n": 2},
    "/v1/messages": CHAT_BODY,
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
}  # fmt: skip


EVENT_MODELS = {
    "/v1/completions": "CompletionChunk",
    "/v1/chat/completions": "ChatCompletionChunk",
    "/v1/messages": "MessageEvent",
    "/v1/responses": "ResponseEvent",
}


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("fails", [False, True])
async def test_every_event_of_a_stream_fits_its_schema(path: str, fails: bool) -> None:
    body = json.dumps(STREAMS[path] | {"stream": True})
    body = body.replace('"hi"', '"!fail"') if fails else body
    transport = httpx.ASGITransport(app=APP)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        reply = await http.post(path, content=body)
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    errors = [event for event in events if "error" in json.dumps(event)[:20]]
    assert len(events) >= 3 and len(errors) == fails
    of_events = validator(APP.openapi(), EVENT_MODELS[path])
    is_chunk = EVENT_MODELS[path].endswith("Chunk")
    of_errors = validator(APP.openapi(), "ErrorResponse") if is_chunk else of_events
    for event in events:
        (of_errors if event in errors else of_events).validate(event)


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("fails", [False, True])
def test_whole_stream_fits_the_document(path: str, fails: bool) -> None:
    """As schemathesis reads it, `[DONE]` and errors included."""
    body = json.dumps(STREAMS[path] | {"stream": True})
    body = body.replace('"hi"', '"!fail"') if fails else body
    case = schema[path]["POST"].Case(body=json.loads(body), media_type="application/json")
    response = case.call(headers={"host": "localhost"})
    assert response.headers["content-type"][0].startswith("text/event-stream")
    case.validate_response(response, checks=CHECKS)


def validator(document: dict[str, Any], name: str) -> jsonschema_rs.Draft202012Validator:
    """Validates one of a document's schemas."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return jsonschema_rs.Draft202012Validator(schema)
