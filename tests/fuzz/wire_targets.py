"""Bytes that come over the wire: bodies of requests, and streams of server-sent events."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ridgeline.errors import DECODE_ERRORS
from ridgeline.measure.client.sse_parser import ServerEvent, SseParser
from ridgeline.measure.client.stream_chunks import decode_chunk, error_message, output_of
from ridgeline.serve.anthropic import schemas as anthropic
from ridgeline.serve.bodies.routing import _parse
from ridgeline.serve.errors import ApiError
from ridgeline.serve.openai import responses_schemas as responses
from ridgeline.serve.openai.embeddings import EmbeddingRequest
from ridgeline.serve.openai.sampling_params import offered_tools
from ridgeline.serve.openai.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    check_supported,
    validate_fields,
)
from ridgeline.serve.rerank.schemas import RerankRequest, ScoreRequest
from ridgeline.serve.tokenize import DetokenizeRequest, TokenizeRequest
from tests.fuzz.bodies import BODIES
from tests.fuzz.mutate import mutate_bytes, mutate_json

MODELS: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/responses": responses.ResponsesRequest,
    "/v1/messages": anthropic.MessagesRequest,
    "/v1/messages/count_tokens": anthropic.CountTokensRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/rerank": RerankRequest,
    "/v1/score": ScoreRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
MAX_VALUES = 100_000


def request_seeds() -> list[bytes]:
    """A line with the route, then the body."""
    return [
        f"{route}\n{json.dumps(body)}".encode()
        for route, bodies in BODIES.items()
        if route in MODELS
        for body in bodies
    ]


def read_request(_: Path, data: bytes) -> None:
    """Parse, validate and translate the body: read, or refused with a client's error."""
    route, _, text = data.partition(b"\n")
    model = MODELS.get(route.decode("latin-1"))
    try:
        fields = _parse(text, MAX_VALUES)
        if model is not None and isinstance(fields, dict):
            _translate(validate_fields(model, fields))
    except ApiError as error:
        assert 400 <= error.status_code < 500 and error.message, error
        json.dumps({"message": error.message, "param": error.param}).encode()
    except ValidationError as error:
        raise AssertionError("not told in the words of the API") from error
    except ValueError as error:
        assert type(error) is ValueError, error  # of the parser: it is not JSON


def _translate(body: BaseModel) -> None:
    chat = body
    if isinstance(body, responses.ResponsesRequest):
        chat = responses.to_chat(body)
    elif isinstance(body, anthropic.CountTokensRequest):
        chat = anthropic.to_chat(body)
    if isinstance(chat, ChatCompletionRequest):
        check_supported(chat)
        offered_tools(chat)
    elif isinstance(chat, CompletionRequest):
        check_supported(chat)


def mutate_request(rng: random.Random, data: bytes) -> bytes:
    route, line, text = data.partition(b"\n")
    if rng.random() < 0.2:
        return route + line + mutate_bytes(rng, text)
    body = mutate_json(rng, json.loads(text))
    return route + line + json.dumps(body).encode("utf-8", "surrogatepass")


STREAMS: list[Any] = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "\u2028a"}}]},
    {"choices": [{"index": 0, "delta": {"reasoning_content": "b"}, "finish_reason": "stop"}]},
    {"choices": [{"index": 0, "text": "c", "token_ids": [1, 2], "logprobs": {"tokens": ["c"]}}]},
    {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2,
                              "prompt_tokens_details": {"cached_tokens": 1}}},
    {"error": {"message": "no", "code": 500}, "metrics": {"time_to_first_token_ms": 2.0}},
]  # fmt: skip


def stream_seeds() -> list[bytes]:
    events = [f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in STREAMS]
    whole = ": ping\n\nevent: delta\r\n" + "".join(events) + "data: [DONE]\n\n"
    return [whole.encode(), whole.replace("\n", "\r\n").encode(), b"data:a\ndata: b\n\ndata: c"]


def read_stream(_: Path, data: bytes) -> None:
    """Events do not depend on how the bytes were split; each is a chunk, or no chunk."""
    events = _events(data, len(data) + 1)
    for size in (1 if len(data) < 200 else 13, 64):
        assert _events(data, size) == events
    for event in events:
        try:
            chunk = decode_chunk(event.data)
        except DECODE_ERRORS:
            continue
        error_message(chunk)
        assert chunk.prefill_s is None or chunk.prefill_s >= 0
        for choice in chunk.choices or ():
            output = output_of(choice, 1.0)
            assert output is None or output.count is None or output.count > 0


def _events(data: bytes, size: int) -> list[ServerEvent]:
    parser = SseParser()
    events = [e for at in range(0, len(data), size) for e in parser.feed(data[at : at + size])]
    return [*events, *parser.close()]


def mutate_stream(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    name, colon, text = lines[at].partition(b": ")
    if name == b"data" and text.strip().startswith(b"{") and rng.random() < 0.7:
        value = mutate_json(rng, json.loads(text))
        lines[at] = name + colon + json.dumps(value).encode("utf-8", "surrogatepass")
        return b"\n".join(lines)
    return mutate_bytes(rng, data)
