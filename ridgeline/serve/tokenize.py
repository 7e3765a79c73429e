"""`/tokenize`, `/detokenize`: the model's own alphabet, as vLLM answers it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serve.errors import ApiError
from ridgeline.serve.openai.sampling_params import chat_prompt, text_prompt
from ridgeline.serve.openai.schemas import ChatRequest, Count, Message, Tool, parse
from ridgeline.serve.service import Service, to_json


class TokenizeRequest(BaseModel):
    """A `prompt`, or `messages` for the chat template."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """Token ids."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    tokens: list[Count]


async def tokenize(service: Service, request: Request) -> Response:
    """POST /tokenize."""
    asked = parse(TokenizeRequest, await service.body(request))
    service.check_model(asked.model)
    tokens = await _tokens(service, asked)
    texts = None
    if asked.return_token_strs:
        decode = service.engine.tokenizer.decode
        texts = [decode([token], skip_special_tokens=False) for token in tokens]
    return to_json(
        {
            "count": len(tokens),
            "max_model_len": service.engine.info.max_model_len,
            "tokens": tokens,
            "token_strs": texts,
        }
    )


async def detokenize(service: Service, request: Request) -> Response:
    """POST /detokenize."""
    asked = parse(DetokenizeRequest, await service.body(request))
    service.check_model(asked.model)
    text = service.engine.tokenizer.decode(asked.tokens, skip_special_tokens=False)
    return to_json({"prompt": text})


async def _tokens(service: Service, asked: TokenizeRequest) -> list[int]:
    tokenizer = service.engine.tokenizer
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "prompt or messages is needed, and not both", param="prompt")
    if asked.prompt is not None:
        specials = asked.add_special_tokens is not False
        return list((await text_prompt(asked.prompt, tokenizer, specials)).tokens)
    chat = ChatRequest(
        messages=asked.messages or [],
        tools=asked.tools,
        add_generation_prompt=asked.add_generation_prompt,
    )
    return list((await chat_prompt(chat, tokenizer, service.caps)).tokens)
