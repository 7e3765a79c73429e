"""schemathesis over our OpenAPI: whatever is sent, no 5xx and no answer outside the schema.

A small share of examples runs with the suite; RIDGELINE_SCHEMATHESIS_EXAMPLES=200 runs them all.
The stub engine never fails by itself, so that a 5xx is always the server's own.
"""

from __future__ import annotations

import os

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

from ridgeline.serve.app import ROUTES, create_app
from ridgeline.serve.openapi import document
from ridgeline.serve.options import ServerOptions
from tests.serve.fake_engine import FakeEngine

EXAMPLES = int(os.environ.get("RIDGELINE_SCHEMATHESIS_EXAMPLES", "4"))
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


def test_every_public_route_is_in_the_document() -> None:
    written = {path.replace("{name}", "{name:path}") for path in document()["paths"]}
    assert written == {path for _, path, _ in ROUTES} - {"/openapi.json"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_errors_are_in_the_schema_too(path: str) -> None:
    responses = document()["paths"][path]["post"]["responses"]
    assert {"200", "4XX", "5XX"} <= set(responses)
