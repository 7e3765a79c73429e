"""`/openapi.json`: what every route takes and gives, from the same records that read the bodies.

Statuses are named one by one, so that an answer with another one is a fault that a fuzzer finds.
The routes of files and batches are in the document where the server has them; the operators'
routes have a document of their own on their own listener.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import ridgeline
from ridgeline.serve.anthropic.schemas import CountRequest, MessagesRequest
from ridgeline.serve.openai.embeddings import EmbeddingRequest
from ridgeline.serve.openai.responses_schema import ResponsesRequest
from ridgeline.serve.openai.schemas import ChatRequest, CompletionRequest
from ridgeline.serve.openapi.batch import BATCH_ANSWERS, BATCH_REQUESTS, batch_paths
from ridgeline.serve.openapi.components import (
    HEADERS,
    STATUSES,
    errors,
    json_answer,
    operation,
    path_parameter,
    text_answer,
)
from ridgeline.serve.openapi.response_schemas import (
    ADMIN_ANSWERS,
    ANSWERS,
    EVENTS,
    REF,
    TEXT,
    Schema,
)
from ridgeline.serve.tokenize import DetokenizeRequest, TokenizeRequest

POSTS: tuple[tuple[str, type[BaseModel], str, bool], ...] = (
    ("/v1/completions", CompletionRequest, "Completion", True),
    ("/v1/chat/completions", ChatRequest, "ChatCompletion", True),
    ("/v1/responses", ResponsesRequest, "Response", True),
    ("/v1/messages", MessagesRequest, "Message", True),
    ("/v1/messages/count_tokens", CountRequest, "TokenCount", False),
    ("/v1/embeddings", EmbeddingRequest, "Embeddings", False),
    ("/tokenize", TokenizeRequest, "Tokens", False),
    ("/detokenize", DetokenizeRequest, "Text", False),
)
"""Path, body, answer, and whether it streams."""

_FREE = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")  # of a key's budget


def document(*, batches: bool = False) -> dict[str, Any]:
    """The OpenAPI 3.1 document of the public routes; `batches`: with those of the Batch API."""
    models = [(kind, "validation") for _, kind, _, _ in POSTS]
    _, definitions = models_json_schema(models, ref_template=REF + "{model}")  # type: ignore[arg-type]
    paths: dict[str, Any] = {
        path: {"post": _post(path, kind, answer, streams)} for path, kind, answer, streams in POSTS
    }
    schemas = {**definitions.get("$defs", {}), **ANSWERS}
    if batches:
        paths |= batch_paths()
        schemas |= {**BATCH_REQUESTS, **BATCH_ANSWERS}
    return _wrap("Ridgeline", paths | _readings(), schemas)


def admin_document() -> dict[str, Any]:
    """The document of the operators' routes (`--admin-port`)."""
    metrics = operation("metrics", text_answer("text/plain", "Prometheus text"), errors())
    state = operation("state", json_answer("State"), errors())
    drain = operation("drain", json_answer("Draining"), errors())
    abort = operation("abort", json_answer("Aborted"), errors(), path_parameter("id"))
    paths = _probes("/health", "/ready") | {
        "/metrics": {"get": metrics},
        "/admin/state": {"get": state},
        "/admin/drain": {"post": drain},
        "/admin/abort/{id}": {"post": abort},
        "/openapi.json": _itself(),
    }
    return _wrap("Ridgeline, for operators", paths, ADMIN_ANSWERS)


def _wrap(title: str, paths: dict[str, Any], schemas: dict[str, Schema]) -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": ridgeline.__version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "headers": HEADERS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _readings() -> dict[str, Any]:
    """What is only read."""
    model = operation("model", json_answer("Model"), errors(404), path_parameter("name"))
    page = operation("page", text_answer("text/html", "the page for people"), errors(), free=True)
    metrics = operation("metrics", text_answer("text/plain", "Prometheus text"), errors())
    return _probes("/health", "/ready", "/ping") | {
        "/v1/models": {"get": operation("models", json_answer("Models"), errors())},
        "/v1/models/{name}": {"get": model},
        "/version": {"get": operation("version", json_answer("Version"), errors())},
        "/metrics": {"get": metrics},
        "/": {"get": page},
        "/ridgeline/config": {"get": operation("config", json_answer("Config"), errors())},
        "/openapi.json": _itself(),
    }


def _probes(*paths: str) -> dict[str, Any]:
    """Answered without a key: 200 for yes, 503 for no."""

    def probe(path: str, method: str = "") -> Schema:
        name = method + path.strip("/")
        return operation(name, {"200": {"description": "yes"}}, errors(), free=True)

    found: dict[str, Any] = {path: {"get": probe(path)} for path in paths}
    if "/ping" in found:
        found["/ping"]["post"] = probe("/ping", "post_")
    return found


def _itself() -> dict[str, Any]:
    answer = {"description": "this", "content": {"application/json": {"schema": {}}}}
    return {"get": operation("openapi", {"200": answer}, errors())}


def _post(path: str, kind: type[BaseModel], answer: str, streams: bool) -> Schema:
    told = json_answer(answer, generates=path not in _FREE)
    if streams:
        told["200"]["content"]["text/event-stream"] = {"schema": _event(EVENTS[answer])}
    body = {"application/json": {"schema": {"$ref": REF + kind.__name__}}}
    made = STATUSES["reads"] + (() if path in _FREE else STATUSES["generates"])
    anthropic = path.startswith("/v1/messages")
    found = operation(path.strip("/").replace("/", "_"), told, errors(*made, anthropic=anthropic))
    return {**found, "requestBody": {"required": True, "content": body}}


def _event(name: str) -> Schema:
    """One server-sent event: its `data` is a `name` as JSON. OpenAI's streams of chunks may break
    with an error, and end in `[DONE]`, which is no JSON."""
    if not name.endswith("Chunk"):
        return _event_with(_json({"$ref": REF + name}))
    told = {"anyOf": [{"$ref": REF + name}, {"$ref": REF + "Error"}]}
    return _event_with({"anyOf": [{"const": "[DONE]"}, _json(told)]})


def _json(schema: Schema) -> Schema:
    """A text that holds such JSON."""
    return {"contentMediaType": "application/json", "contentSchema": schema}


def _event_with(data: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {"data": TEXT | data, "event": TEXT},
        "required": ["data"],
    }
