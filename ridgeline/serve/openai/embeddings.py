"""`/v1/embeddings`: hidden states of the last layer, pooled over a text and scaled to length 1."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Sequence
from typing import Literal

from fastapi import APIRouter, Request, Response

from ridgeline.serve.auth.middleware import caller_of
from ridgeline.serve.bodies.routing import JsonRoute
from ridgeline.serve.config import LIMITS
from ridgeline.serve.errors import ApiError, check_limit
from ridgeline.serve.generation.disconnect import cancel_on_disconnect
from ridgeline.serve.generation.ids import new_id
from ridgeline.serve.generation.request import TokenPrompt
from ridgeline.serve.generation.respond import json_response, request_id, response_headers
from ridgeline.serve.openai.objects import EmbeddingResponse
from ridgeline.serve.openai.sampling_params import prompt_entries, to_prompt, truncate
from ridgeline.serve.openai.schemas import Count, OpenBody, Priority, PromptLength, Prompts
from ridgeline.serve.openapi import GENERATION_HEADERS, error_responses
from ridgeline.serve.service import Service, ServiceDep

router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)


class EmbeddingRequest(OpenBody):
    """Body of `POST /v1/embeddings`.

    `pooling`: the `mean` over all positions, or the `last` one. It and `normalize` are by default
    what the model's sentence-transformers files say, or else the normalised mean. Of a longer text
    only the last `truncate_prompt_tokens` count.
    """

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    pooling: Literal["mean", "last"] | None = None
    normalize: bool | None = None
    user: str | None = None
    priority: Priority | None = None
    truncate_prompt_tokens: PromptLength | None = None


@router.post(
    "/v1/embeddings",
    summary="Embed texts",
    operation_id="create_embeddings",
    response_model=EmbeddingResponse,
    responses=error_responses(429, body=True) | {200: {"headers": GENERATION_HEADERS}},
)
async def create_embeddings(
    body: EmbeddingRequest, request: Request, service: ServiceDep
) -> Response:
    service.check_model(body.model, allow_adapters=False)
    prompts = await _prompts(body, service, request)
    num_tokens = sum(len(prompt.tokens) for prompt in prompts)
    caller = caller_of(request.scope)
    budget = service.budgets.of(caller, service.now())
    rate_headers = service.charge_prompts(budget, prompts)
    sent_id = request_id(request.headers, None, new_id("embd-"))
    with service.exported(request, sent_id, num_tokens):
        async with cancel_on_disconnect(request.receive):
            vectors = await _embed(prompts, body, service, caller.name)
    for prompt in prompts:
        service.metrics.count_prompt(len(prompt.tokens))
    embeddings: EmbeddingResponse = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _encode(vector, body)}
            for index, vector in enumerate(vectors)
        ],
        "model": service.name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    headers = response_headers(sent_id, sorted(body.model_extra or {})) | rate_headers
    return json_response(embeddings, headers)


async def _prompts(body: EmbeddingRequest, service: Service, request: Request) -> list[TokenPrompt]:
    entries = prompt_entries(body.input) or [""]
    check_limit("input", len(entries), LIMITS.max_inputs, "inputs")
    reader, max_tokens = service.prompt_reader(request), service.engine.info.max_model_len
    limit = body.truncate_prompt_tokens
    is_cut = limit is not None
    read = [await to_prompt(entry, reader, True, is_cut=is_cut) for entry in entries]
    prompts = [truncate(prompt, limit) for prompt in read]
    for prompt in prompts:
        check_limit("input", len(prompt.tokens), max_tokens, "tokens in one input")
    return prompts


async def _embed(
    prompts: Sequence[TokenPrompt], body: EmbeddingRequest, service: Service, account: str
) -> list[Sequence[float]]:
    """One text after the other, so that those of other requests are computed in between."""
    vectors: list[Sequence[float]] = []
    info = service.engine.info
    normalize = info.normalize if body.normalize is None else body.normalize
    for prompt in prompts:
        future = service.engine.embed(prompt.tokens, body.pooling or info.pooling, account)
        vector = await asyncio.wrap_future(future)
        if body.dimensions is not None and body.dimensions != len(vector):
            message = f"dimensions must be {len(vector)} for this model"
            raise ApiError(400, message, param="dimensions")
        vectors.append(_normalise(vector) if normalize else vector)
    return vectors


def _normalise(vector: Sequence[float]) -> Sequence[float]:
    length = sum(value * value for value in vector) ** 0.5
    return [value / length for value in vector] if length > 0 else vector


def _encode(vector: Sequence[float], body: EmbeddingRequest) -> list[float] | str:
    """Numbers, or little-endian float32 in base64, which OpenAI's client requests."""
    if body.encoding_format != "base64":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
