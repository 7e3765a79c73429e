"""`/openapi.json`: what every route takes and gives, from the same records that read the bodies.

The schemas of answers are written down here, since answers are plain builtins; the tests hold
every answer against them.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import ridgeline
from ridgeline.serve.api.embeddings import EmbeddingRequest
from ridgeline.serve.api.messages_in import CountRequest, MessagesRequest
from ridgeline.serve.api.responses_in import ResponsesRequest
from ridgeline.serve.api.text import DetokenizeRequest, TokenizeRequest
from ridgeline.serve.requests import ChatRequest, CompletionRequest

Schema = dict[str, Any]
REF = "#/components/schemas/"
_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_ANY_TEXT: Schema = {"type": ["string", "null"]}


def _object(required: dict[str, Schema], **more: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **more},
        "required": list(required),
    }


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def _ref(name: str) -> Schema:
    return {"$ref": REF + name}


_USAGE = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
    }
)
_ENDING: dict[str, Schema] = {
    "index": _COUNT,
    "finish_reason": {"enum": ["stop", "length", "tool_calls", "abort"]},
    "stop_reason": {"type": ["string", "integer", "null"]},
}
_LOGPROBS: Schema = {"type": ["object", "null"]}
_MODEL = _object(
    {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": _TEXT,
        "max_model_len": _COUNT,
    }
)

ANSWERS: dict[str, Schema] = {
    "Completion": _object(
        {
            "id": _TEXT,
            "object": {"const": "text_completion"},
            "created": _COUNT,
            "model": _TEXT,
            "choices": _list(_object({**_ENDING, "text": _TEXT, "logprobs": _LOGPROBS})),
            "usage": _USAGE,
        }
    ),
    "ChatCompletion": _object(
        {
            "id": _TEXT,
            "object": {"const": "chat.completion"},
            "created": _COUNT,
            "model": _TEXT,
            "choices": _list(
                _object(
                    {
                        **_ENDING,
                        "message": _object(
                            {"role": {"const": "assistant"}, "content": _ANY_TEXT},
                            tool_calls=_list({"type": "object"}),
                            reasoning_content=_TEXT,
                        ),
                        "logprobs": _LOGPROBS,
                    }
                )
            ),
            "usage": _USAGE,
        }
    ),
    "Message": _object(
        {
            "id": _TEXT,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": _TEXT,
            "content": _list(_object({"type": {"enum": ["text", "thinking", "tool_use"]}})),
            "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            "stop_sequence": _ANY_TEXT,
            "usage": _object({"input_tokens": _COUNT, "output_tokens": _COUNT}),
        }
    ),
    "TokenCount": _object({"input_tokens": _COUNT}),
    "Response": _object(
        {
            "id": _TEXT,
            "object": {"const": "response"},
            "created_at": _COUNT,
            "status": {"enum": ["completed", "incomplete"]},
            "model": _TEXT,
            "output": _list(
                _object({"type": {"enum": ["message", "function_call", "reasoning"]}, "id": _TEXT})
            ),
            "usage": _object({"input_tokens": _COUNT, "output_tokens": _COUNT}),
            "store": {"const": False},
        }
    ),
    "Embeddings": _object(
        {
            "object": {"const": "list"},
            "model": _TEXT,
            "data": _list(
                _object(
                    {
                        "object": {"const": "embedding"},
                        "index": _COUNT,
                        "embedding": {"anyOf": [_list({"type": "number"}), _TEXT]},
                    }
                )
            ),
            "usage": _object({"prompt_tokens": _COUNT, "total_tokens": _COUNT}),
        }
    ),
    "Tokens": _object(
        {
            "count": _COUNT,
            "max_model_len": _COUNT,
            "tokens": _list(_COUNT),
            "token_strs": {"anyOf": [_list(_TEXT), {"type": "null"}]},
        }
    ),
    "Text": _object({"prompt": _TEXT}),
    "Models": _object({"object": {"const": "list"}, "data": _list(_MODEL, minItems=1)}),
    "Model": _MODEL,
    "Version": _object({"version": _TEXT}),
    "Error": _object(
        {"error": _object({"message": _TEXT, "type": _TEXT, "param": _ANY_TEXT, "code": _COUNT})}
    ),
    "AnthropicError": _object(
        {"type": {"const": "error"}, "error": _object({"type": _TEXT, "message": _TEXT})}
    ),
}

_EVENT = _object({"data": _TEXT}, event=_TEXT)
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
_NAME: Schema = {"name": "name", "in": "path", "required": True, "schema": _TEXT}


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document of the public routes."""
    models = [(kind, "validation") for _, kind, _, _ in POSTS]
    _, definitions = models_json_schema(models, ref_template=REF + "{model}")  # type: ignore[arg-type]
    paths: dict[str, Any] = {
        path: {"post": _post(path, kind, answer, streams)} for path, kind, answer, streams in POSTS
    }
    paths["/v1/models"] = {"get": _get("/v1/models", "Models")}
    paths["/v1/models/{name}"] = {"get": {**_get("/v1/models", "Model"), "parameters": [_NAME]}}
    paths["/version"] = {"get": _get("/version", "Version")}
    for path in ("/health", "/ready", "/ping"):
        paths[path] = {"get": {"responses": {"200": {"description": "yes"}, "503": _error(path)}}}
    paths["/metrics"] = {"get": {"responses": {"200": _text_answer(), **_errors("/metrics")}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Ridgeline", "version": ridgeline.__version__},
        "paths": paths,
        "components": {
            "schemas": {**definitions.get("$defs", {}), **ANSWERS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _post(path: str, kind: type[BaseModel], answer: str, streams: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _ref(answer)}}
    if streams:
        content["text/event-stream"] = {"schema": _EVENT}
    body = {"application/json": {"schema": _ref(kind.__name__)}}
    return {
        "requestBody": {"required": True, "content": body},
        "responses": {"200": {"description": "the answer", "content": content}, **_errors(path)},
    }


def _get(path: str, answer: str) -> dict[str, Any]:
    content = {"application/json": {"schema": _ref(answer)}}
    return {"responses": {"200": {"description": answer, "content": content}, **_errors(path)}}


def _text_answer() -> Schema:
    return {"description": "Prometheus text", "content": {"text/plain": {"schema": _TEXT}}}


def _errors(path: str) -> dict[str, Any]:
    return {"4XX": _error(path), "5XX": _error(path)}


def _error(path: str) -> Schema:
    name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    content = {"application/json": {"schema": _ref(name)}}
    return {"description": "an error", "content": content}
