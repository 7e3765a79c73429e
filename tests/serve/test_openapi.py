"""schemathesis over our OpenAPI: whatever is sent, no 5xx and no answer outside the schema.

A small share of examples runs with the suite, over a stub engine that never fails by itself, so
that a 5xx is always the server's own. `scripts/fuzz_api.py` runs all phases with 200 examples per
operation against the real engine.
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
from starlette.applications import Starlette

from ridgeline.serve.app import ADMIN_ROUTES, create_admin_app, create_app
from ridgeline.serve.config import ServerOptions
from ridgeline.serve.openapi.document import admin_document, document
from ridgeline.serve.openapi.response_schemas import EVENTS
from tests.serve.batch.conftest import with_batches
from tests.serve.fake_engine import FakeEngine

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
def test_no_answer_outside_the_schema(case: schemathesis.Case) -> None:
    response = case.call(headers={"host": "localhost"})
    case.validate_response(response, checks=CHECKS)


def operations(written: dict[str, Any]) -> set[tuple[str, str]]:
    return {(method.upper(), path) for path, told in written["paths"].items() for method in told}


def routes(app: Starlette) -> set[tuple[str, str]]:
    """What the app answers; HEAD is GET without a body."""
    pairs = ((m, r.path) for r in app.routes for m in r.methods)  # type: ignore[attr-defined]
    return {(method, path.replace(":path}", "}")) for method, path in pairs if method != "HEAD"}


def test_every_route_is_in_the_document(tmp_path: Path) -> None:
    with_store = with_batches(FakeEngine(), tmp_path / "batches.sqlite")
    assert operations(document()) == routes(APP)
    assert operations(document(batches=True)) == routes(with_store)
    assert operations(admin_document()) == routes(create_admin_app(APP.state.service))
    assert len(ADMIN_ROUTES) == len(operations(admin_document()))


async def test_the_document_knows_whether_there_are_batches(tmp_path: Path) -> None:
    for app, has in ((APP, False), (with_batches(FakeEngine(), tmp_path / "b.sqlite"), True)):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            told = (await http.get("/openapi.json")).json()
        assert ("/v1/batches" in told["paths"]) is has


@pytest.mark.parametrize("written", [document(batches=True), admin_document()])
def test_every_reference_leads_somewhere_and_every_error_has_a_body(
    written: dict[str, Any],
) -> None:
    parts = written["components"]
    for found in re.findall(r'"#/components/(\w+)/([^"]+)"', json.dumps(written)):
        assert found[1] in parts[found[0]], found
    names = [told["operationId"] for path in written["paths"].values() for told in path.values()]
    assert len(names) == len(set(names))
    for path in written["paths"].values():
        for told in path.values():
            for status, answer in told["responses"].items():
                assert status == "200" or answer["content"]["application/json"]["schema"]
                assert ("Retry-After" in answer.get("headers", {})) == (status in ("429", "503"))


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


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("fails", [False, True])
async def test_every_event_of_a_stream_is_in_the_schema(path: str, fails: bool) -> None:
    body = json.dumps(STREAMS[path] | {"stream": True})
    body = body.replace('"hi"', '"!fail"') if fails else body
    transport = httpx.ASGITransport(app=APP)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        reply = await http.post(path, content=body)
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    answer = document()["paths"][path]["post"]["responses"]["200"]["content"]
    name = EVENTS[answer["application/json"]["schema"]["$ref"].rpartition("/")[2]]
    errors = [event for event in events if "error" in json.dumps(event)[:20]]
    assert len(events) >= 3 and len(errors) == fails
    for event in events:
        is_error = event in errors and name.endswith("Chunk")
        validator(document(), "Error" if is_error else name).validate(event)


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_is_in_the_schema_to_its_last_event(path: str, fails: bool) -> None:
    """As schemathesis reads the document, `[DONE]` and errors on the way included."""
    body = json.dumps(STREAMS[path] | {"stream": True})
    body = body.replace('"hi"', '"!fail"') if fails else body
    case = schema[path]["POST"].Case(body=json.loads(body), media_type="application/json")
    response = case.call(headers={"host": "localhost"})
    assert response.headers["content-type"][0].startswith("text/event-stream")
    case.validate_response(response, checks=CHECKS)


def validator(written: dict[str, Any], name: str) -> jsonschema_rs.Draft202012Validator:
    """Of one of a document's schemas."""
    whole = {"$ref": f"#/components/schemas/{name}", "components": written["components"]}
    return jsonschema_rs.Draft202012Validator(whole)
