"""`/v1/rerank` and `/v1/score`: how well documents answer a query, judged by the served model.

Each pair is one prompt, after which one token is sampled for the sake of the log-probabilities of
"yes" and "no", which give the score. Pairs of a request share the prefix cache up to the document,
and are batched, scheduled, charged and counted like completions, `LIMITS.max_prompts` at a time:
2,048 of them would never fit the queue, and a long query in all of them not the memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import msgspec
from fastapi import APIRouter, Request, Response

from ridgeline.records import Sampling
from ridgeline.serve.bodies.routing import JsonRoute
from ridgeline.serve.config import LIMITS
from ridgeline.serve.errors import ApiError, check_limit
from ridgeline.serve.generation.collect import CollectedChoice, collect
from ridgeline.serve.generation.disconnect import cancel_on_disconnect
from ridgeline.serve.generation.prompt_reader import PromptReader, in_thread_if_long
from ridgeline.serve.generation.request import RequestOptions, TokenPrompt
from ridgeline.serve.generation.respond import json_response
from ridgeline.serve.generation.stream import ResponseStream
from ridgeline.serve.openapi import GENERATION_HEADERS, error_responses
from ridgeline.serve.rerank.schemas import (
    RerankRequest,
    RerankResponse,
    RerankResult,
    ScoreRequest,
    ScoreResponse,
)
from ridgeline.serve.rerank.template import RerankTokens, pair_text, rerank_tokens
from ridgeline.serve.service import Service, ServiceDep

router = APIRouter(tags=["Reranking"], route_class=JsonRoute)
_RESPONSES = error_responses(429, body=True) | {200: {"headers": GENERATION_HEADERS}}


@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
@router.post(
    "/v1/rerank",
    summary="Order documents by relevance",
    operation_id="rerank",
    response_model=RerankResponse,
    responses=_RESPONSES,
)
async def rerank(body: RerankRequest, request: Request, service: ServiceDep) -> Response:
    service.check_model(body.model, allow_adapters=False)
    texts = [item if isinstance(item, str) else item.text for item in body.documents]
    check_limit("documents", len(texts), LIMITS.max_inputs, "documents")
    tokens = rerank_tokens(service.engine.tokenizer)
    limit = body.max_tokens_per_doc
    reader = service.prompt_reader(request)
    documents = [await _truncated(text, limit, service, reader) for text in texts]
    pairs = [(body.query, document) for document in documents]
    scored = await _score_pairs(body, request, service, reader, tokens, pairs)
    scores = scored.scores
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    returns = body.return_documents is not False
    results: list[RerankResult] = [
        {"index": index, "document": {"text": texts[index]}, "relevance_score": scores[index]}
        if returns
        else {"index": index, "relevance_score": scores[index]}
        for index in order
    ]
    response: RerankResponse = {
        "id": scored.id,
        "model": service.name,
        "results": results,
        "usage": {"prompt_tokens": scored.num_tokens, "total_tokens": scored.num_tokens},
    }
    return json_response(response, scored.headers)


@router.post("/score", include_in_schema=False)
@router.post(
    "/v1/score",
    summary="Score pairs of texts",
    operation_id="score",
    response_model=ScoreResponse,
    responses=_RESPONSES,
)
async def score(body: ScoreRequest, request: Request, service: ServiceDep) -> Response:
    service.check_model(body.model, allow_adapters=False)
    queries, documents = _pairs(body)
    tokens = rerank_tokens(service.engine.tokenizer)
    pairs = list(zip(queries, documents, strict=True))
    reader = service.prompt_reader(request)
    scored = await _score_pairs(body, request, service, reader, tokens, pairs)
    response: ScoreResponse = {
        "id": scored.id,
        "object": "list",
        "created": int(time.time()),
        "model": service.name,
        "data": [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(scored.scores)
        ],
        "usage": {"prompt_tokens": scored.num_tokens, "total_tokens": scored.num_tokens},
    }
    return json_response(response, scored.headers)


def _pairs(body: ScoreRequest) -> tuple[list[str], list[str]]:
    """The two sides of every pair; one text is compared with each of the other side."""
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    check_limit("text_1", len(first), LIMITS.max_inputs, "texts")
    check_limit("text_2", len(second), LIMITS.max_inputs, "texts")
    for name, texts in (("text_1", first), ("text_2", second)):
        if not texts:
            raise ApiError(400, f"{name} has no text", param=name)
    if len(first) not in (1, len(second)):
        message = (
            f"text_1 has {len(first)} texts and text_2 {len(second)}; "
            "fix: send one text_1, or as many as text_2"
        )
        raise ApiError(400, message, param="text_1")
    return first * (len(second) // len(first)), second


async def _truncated(
    document: str, num_tokens: int | None, service: Service, reader: PromptReader
) -> str:
    """The text of the document's first `num_tokens`."""
    if num_tokens is None:
        return document
    prompt = await reader.read(document, add_special_tokens=False, is_cut=True)
    kept, decode = prompt.tokens[:num_tokens], service.engine.tokenizer.decode
    if len(kept) == len(prompt.tokens):
        return document
    return await in_thread_if_long(len(kept), lambda: decode(kept, skip_special_tokens=False))


class _Scored(msgspec.Struct):
    """The scores of all pairs; id and headers are those of the first ones."""

    id: str = ""
    headers: Mapping[str, str] = {}
    num_tokens: int = 0
    scores: list[float] = msgspec.field(default_factory=list)


async def _score_pairs(
    body: RerankRequest | ScoreRequest,
    request: Request,
    service: Service,
    reader: PromptReader,
    tokens: RerankTokens,
    pairs: Sequence[tuple[str, str]],
) -> _Scored:
    """Submit the pairs of a query and a document in parts, each when the one before is scored."""
    scored = _Scored()
    for begin in range(0, len(pairs), LIMITS.max_prompts):
        part = pairs[begin : begin + LIMITS.max_prompts]
        stream = await _submit(body, request, service, reader, tokens, part)
        scored.scores += await _scores(stream, request)
        scored.num_tokens += stream.request.num_prompt_tokens
        if not scored.id:
            scored.id, scored.headers = stream.request.id, stream.request.headers
        sent_id = scored.headers["x-request-id"]
        scored.headers = {**stream.request.headers, "x-request-id": sent_id}
    return scored


async def _submit(
    body: RerankRequest | ScoreRequest,
    request: Request,
    service: Service,
    reader: PromptReader,
    tokens: RerankTokens,
    pairs: Sequence[tuple[str, str]],
) -> ResponseStream:
    limit = body.truncate_prompt_tokens if isinstance(body, ScoreRequest) else None
    prefix = "score" if isinstance(body, ScoreRequest) else "rerank"
    prompts = []
    for query, document in pairs:
        text = pair_text(query, document, body.instruction)
        read = await reader.read(text, add_special_tokens=False, is_cut=limit is not None)
        pair = read.tokens
        if limit is not None:
            pair = pair[: max(0, limit - len(tokens.prefix) - len(tokens.suffix))]
        full = (*tokens.prefix, *pair, *tokens.suffix)
        prompts.append(TokenPrompt(full, num_charged=read.num_charged))
    sampling = Sampling(
        temperature=0.0,
        max_tokens=1,
        logprobs=0,
        logprob_token_ids=(tokens.yes, tokens.no),
        ignore_eos=True,
    )
    options = RequestOptions(
        priority=body.priority,
        cache_salt=body.cache_salt,
        ignored=tuple(sorted(body.model_extra or {})),
    )
    return service.submit(
        request, prefix, prompts, sampling, options, streamed=False, score_only=True
    )


async def _scores(stream: ResponseStream, request: Request) -> list[float]:
    """The probability of "yes" against "no" for every pair."""
    async with cancel_on_disconnect(request.receive):
        choices = await collect(stream)
    return [_probability_of_yes(choice) for choice in choices]


def _probability_of_yes(choice: CollectedChoice) -> float:
    [token] = choice.tokens
    assert token.logprobs is not None, "log-probabilities were requested"
    (_, yes), (_, no) = token.logprobs.top
    return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))
