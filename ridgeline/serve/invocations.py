"""`/invocations`: the route that Amazon SageMaker calls, whatever the model does."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from ridgeline.serve.bodies.routing import JsonRoute
from ridgeline.serve.errors import ApiError, from_validation
from ridgeline.serve.openai.embeddings import EmbeddingRequest, create_embeddings
from ridgeline.serve.openai.routes import create_chat_completion, create_completion
from ridgeline.serve.openai.schemas import ChatCompletionRequest, CompletionRequest
from ridgeline.serve.openapi import GENERATION_HEADERS, error_responses
from ridgeline.serve.service import ServiceDep

router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

_OPERATIONS: tuple[tuple[str, str, type[Any], Any], ...] = (
    ("messages", "/v1/chat/completions", ChatCompletionRequest, create_chat_completion),
    ("prompt", "/v1/completions", CompletionRequest, create_completion),
    ("input", "/v1/embeddings", EmbeddingRequest, create_embeddings),
)
"""Field that tells the bodies apart, path and model of the body, and the operation."""


@router.post(
    "/invocations",
    summary="Chat, completion or embedding, by the fields of the body",
    operation_id="invoke",
    response_model=None,
    responses=error_responses(429, body=True)
    | {
        200: {
            "headers": GENERATION_HEADERS,
            "content": {
                "application/json": {"schema": {"type": "object"}},
                "text/event-stream": {"schema": {"type": "object"}},
            },
        }
    },
)
async def invoke(body: dict[str, Any], request: Request, service: ServiceDep) -> Response:
    for field, path, model, operation in _OPERATIONS:
        if field in body:
            request.state.path = path
            try:
                checked = model.model_validate(body)
            except ValidationError as error:
                raise from_validation(error, body) from None
            response: Response = await operation(checked, request, service)
            return response
    raise ApiError(400, "the body needs one of the fields messages, prompt and input")
