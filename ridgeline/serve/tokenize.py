"""`/tokenize` and `/detokenize`, as in vLLM."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from ridgeline.serve.bodies.fail_fast import RequestModel
from ridgeline.serve.bodies.routing import JsonRoute
from ridgeline.serve.errors import ApiError
from ridgeline.serve.generation.prompt_reader import PromptReader
from ridgeline.serve.generation.respond import json_response
from ridgeline.serve.openai.objects import NonNegative
from ridgeline.serve.openai.sampling_params import chat_prompt
from ridgeline.serve.openai.schemas import (
    ChatCompletionRequest,
    ChatMessage,
    ChatTool,
    ChatToolChoice,
    ReasoningEffort,
    TokenIds,
)
from ridgeline.serve.openapi import error_responses
from ridgeline.serve.service import ServiceDep

router = APIRouter(tags=["Tokenizer"], route_class=JsonRoute)


class TokenizeRequest(RequestModel):
    """A `prompt`, or `messages` for the chat template."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: list[ChatTool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    tool_choice: ChatToolChoice | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(TypedDict):
    """Token ids, and their texts if requested."""

    count: NonNegative
    max_model_len: NonNegative
    tokens: list[NonNegative]
    token_strs: list[str] | None


class DetokenizeRequest(RequestModel):
    """Token ids."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    tokens: TokenIds


class DetokenizeResponse(TypedDict):
    """The text of the tokens."""

    prompt: str


@router.post(
    "/tokenize",
    summary="Tokenise a prompt or a conversation",
    operation_id="tokenize",
    response_model=TokenizeResponse,
    responses=error_responses(body=True),
)
async def tokenize(body: TokenizeRequest, request: Request, service: ServiceDep) -> Response:
    service.check_model(body.model)
    tokens = await _tokenize(body, service.prompt_reader(request))
    token_strs = None
    if body.return_token_strs:
        token_strs = await service.prompt_reader(request).decode_each(tokens)
    tokenized: TokenizeResponse = {
        "count": len(tokens),
        "max_model_len": service.engine.info.max_model_len,
        "tokens": tokens,
        "token_strs": token_strs,
    }
    return json_response(tokenized)


@router.post(
    "/detokenize",
    summary="Decode tokens",
    operation_id="detokenize",
    response_model=DetokenizeResponse,
    responses=error_responses(body=True),
)
async def detokenize(body: DetokenizeRequest, request: Request, service: ServiceDep) -> Response:
    service.check_model(body.model)
    vocab_size = service.engine.info.vocab_size
    if vocab_size is not None and body.tokens and max(body.tokens) >= vocab_size:
        place = next(i for i, token in enumerate(body.tokens) if token >= vocab_size)
        message = (
            f"tokens.{place}: not a token id; got {body.tokens[place]}; limit: {vocab_size - 1}"
        )
        raise ApiError(400, message, param="tokens")
    decoded: DetokenizeResponse = {
        "prompt": await service.prompt_reader(request).decode(body.tokens)
    }
    return json_response(decoded)


async def _tokenize(body: TokenizeRequest, reader: PromptReader) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "send either prompt or messages", param="prompt")
    if body.prompt is not None:
        add_special_tokens = body.add_special_tokens is not False
        prompt = await reader.read(body.prompt, add_special_tokens=add_special_tokens, is_cut=True)
        return list(prompt.tokens)
    chat = ChatCompletionRequest(
        messages=body.messages or [],
        tools=body.tools,
        tool_choice=body.tool_choice,
        add_generation_prompt=body.add_generation_prompt,
        add_special_tokens=body.add_special_tokens,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning_effort,
    )
    return list((await chat_prompt(chat, reader)).tokens)
