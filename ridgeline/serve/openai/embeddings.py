"""`/v1/embeddings`: the last layer's states, pooled over a text and scaled to length 1."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serve.auth.middleware import caller_of
from ridgeline.serve.errors import ApiError
from ridgeline.serve.generation.respond import answer_headers, request_id_of
from ridgeline.serve.http.stream_writer import UntilGone
from ridgeline.serve.ids import fresh_id
from ridgeline.serve.openai.sampling_params import Prompt, check_cap, entries_of, prompt_of
from ridgeline.serve.openai.schemas import Count, Priority, Prompts, parse
from ridgeline.serve.service import Service, to_json


class EmbeddingRequest(BaseModel):
    """`pooling`: over which positions; `mean` of all, or the `last` alone."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    pooling: Literal["mean", "last"] | None = None
    normalize: bool | None = None
    user: str | None = None
    priority: Priority | None = None


async def embed(service: Service, request: Request) -> Response:
    """POST /v1/embeddings."""
    asked = parse(EmbeddingRequest, await service.body(request))
    service.check_model(asked.model)
    prompts = await _prompts(service, asked)
    num_tokens = sum(len(prompt.tokens) for prompt in prompts)
    fee = service.accounts.of(caller_of(request.scope), service.now()).charge(
        num_tokens, service.now()
    )
    async with UntilGone(request.scope, request.receive):
        vectors = await _vectors(service, prompts, asked)
    for prompt in prompts:
        service.metrics.count_prompt(len(prompt.tokens))
    data = [
        {"object": "embedding", "index": index, "embedding": _written(vector, asked)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    ignored = tuple(sorted(asked.model_extra or {}))
    request_id = request_id_of(request.headers, None, fresh_id("embd-"))
    headers = answer_headers(request_id, ignored) | fee
    payload = {"object": "list", "data": data, "model": service.name, "usage": usage}
    return to_json(payload, headers)


async def _prompts(service: Service, asked: EmbeddingRequest) -> list[Prompt]:
    entries = entries_of(asked.input) or [""]
    check_cap("input", len(entries), service.caps.max_inputs, "inputs")
    tokenizer = service.engine.tokenizer
    prompts = [await prompt_of(entry, tokenizer, True, name="input") for entry in entries]
    most = service.engine.info.max_model_len
    for prompt in prompts:
        check_cap("input", len(prompt.tokens), most, "tokens in one input")
    return prompts


async def _vectors(
    service: Service, prompts: Sequence[Prompt], asked: EmbeddingRequest
) -> list[Sequence[float]]:
    """One after the other, so that between two of them others get their step."""
    vectors: list[Sequence[float]] = []
    for prompt in prompts:
        future = service.engine.embed(prompt.tokens, asked.pooling or "mean")
        vector = await asyncio.wrap_future(future)
        if asked.dimensions is not None and asked.dimensions != len(vector):
            message = f"dimensions is {len(vector)} for this model, and cannot be chosen"
            raise ApiError(400, message, param="dimensions")
        vectors.append(vector if asked.normalize is False else _unit(vector))
    return vectors


def _unit(vector: Sequence[float]) -> Sequence[float]:
    length = sum(value * value for value in vector) ** 0.5
    return [value / length for value in vector] if length > 0 else vector


def _written(vector: Sequence[float], asked: EmbeddingRequest) -> Any:
    """Numbers, or little-endian float32 in base64 (what OpenAI's client asks for)."""
    if asked.encoding_format != "base64":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
