"""The bricks of the OpenAPI documents: operations, answers, errors by status, headers."""

from __future__ import annotations

from typing import Any

from ridgeline.serve.openapi.response_schemas import REF, TEXT, Schema

_MEANINGS = {
    400: "malformed, out of range, or not supported",
    401: "the key is missing or wrong",
    403: "that Host or Origin, or not an administrator",
    404: "there is no such thing",
    408: "the body did not come in time, or timeout_ms passed",
    409: "not in the state that it is in",
    413: "too large",
    429: "this key's budget is spent",
    431: "the headers are too large",
    500: "the engine failed on this request",
    503: "no capacity, stopping, or the engine is dead",
}
STATUSES: dict[str, tuple[int, ...]] = {
    "always": (401, 403, 431, 500, 503),
    "reads": (400, 404, 408, 413),
    "generates": (408, 429),
}
"""What may go wrong: for every request, for one with a body, for one that the engine answers."""

HEADERS: dict[str, Schema] = {
    "Retry-After": {
        "description": "Seconds until it is worth asking again; computed, not fixed.",
        "required": True,
        "schema": {"type": "integer", "minimum": 0},
    },
    "X-Request-Id": {
        "description": "The request's own id, or the answer's.",
        "required": True,
        "schema": TEXT,
    },
    "X-Ridgeline-Ignored-Fields": {
        "description": "Fields that were sent, accepted and not looked at.",
        "schema": TEXT,
    },
    **{
        f"X-RateLimit-{what}-{kind}": {
            "description": f"Of this key's {kind.lower()} per minute, where they are limited.",
            "schema": TEXT,
        }
        for what in ("Limit", "Remaining", "Reset")
        for kind in ("Requests", "Tokens")
    },
}


def operation(
    name: str,
    answers: dict[str, Any],
    failures: dict[str, Any],
    *parameters: Schema,
    free: bool = False,
) -> Schema:
    """One operation; `free`: nobody is asked for a key (else: for one, where keys are set)."""
    if free:
        failures = {status: told for status, told in failures.items() if status != "401"}
    found: Schema = {
        "operationId": name,
        "responses": {**answers, **failures},
        "security": [] if free else [{"key": []}, {}],
    }
    return {**found, "parameters": list(parameters)} if parameters else found


def json_answer(schema: str, *, generates: bool = False) -> dict[str, Any]:
    """A 200 with a JSON body; `generates`: with the headers of a priced answer."""
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": REF + schema}}}
    answer: dict[str, Any] = {"description": schema, "content": content}
    if generates:
        answer["headers"] = {name: _header(name) for name in HEADERS if name != "Retry-After"}
    return {"200": answer}


def text_answer(kind: str, what: str) -> dict[str, Any]:
    return {"200": {"description": what, "content": {kind: {"schema": TEXT}}}}


def errors(*statuses: int, anthropic: bool = False) -> dict[str, Any]:
    """These and what any request may get, each with its body."""
    body = {"$ref": REF + ("AnthropicError" if anthropic else "Error")}
    found: dict[str, Any] = {}
    for status in sorted({*STATUSES["always"], *statuses}):
        told: Schema = {
            "description": _MEANINGS[status],
            "content": {"application/json": {"schema": body}},
        }
        if status in (429, 503):
            told["headers"] = {"Retry-After": _header("Retry-After")}
        found[str(status)] = told
    return found


def path_parameter(name: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": {**TEXT, "minLength": 1}}


def query_parameter(name: str, schema: Schema) -> Schema:
    return {"name": name, "in": "query", "schema": schema}


def _header(name: str) -> Schema:
    return {"$ref": f"#/components/headers/{name}"}
