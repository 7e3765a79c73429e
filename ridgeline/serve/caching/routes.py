"""`/v1/cache/warm` and `/v1/cache/forget`: compute, pin and drop prefixes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import ConfigDict, Field, ValidationError
from typing_extensions import TypedDict

from ridgeline.errors import DECODE_ERRORS, BadInput
from ridgeline.records import CachePolicy, Sampling
from ridgeline.serve.auth.middleware import CALLER, caller_of
from ridgeline.serve.bodies.fail_fast import RequestModel
from ridgeline.serve.bodies.routing import JsonRoute
from ridgeline.serve.errors import ApiError
from ridgeline.serve.generation.collect import collect
from ridgeline.serve.generation.disconnect import cancel_on_disconnect
from ridgeline.serve.generation.request import RequestOptions, TokenPrompt
from ridgeline.serve.generation.respond import json_response
from ridgeline.serve.openai.chat import TTL_S
from ridgeline.serve.openai.objects import NonNegative
from ridgeline.serve.openai.sampling_params import chat_prompt
from ridgeline.serve.openai.schemas import (
    CacheSalt,
    ChatCompletionRequest,
    ChatMessage,
    ChatTool,
)
from ridgeline.serve.openapi import error_responses
from ridgeline.serve.service import Service, ServiceDep

router = APIRouter(tags=["Cache"], route_class=JsonRoute)


class PrefixRequest(RequestModel):
    """The beginning of prompts: a `prompt`, or `messages` and `tools` for the chat template."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: list[ChatTool] | None = None
    cache_salt: CacheSalt | None = None


class WarmRequest(PrefixRequest):
    """A prefix to compute and to pin."""

    ttl: Literal["5m", "1h"] | None = None


class WarmResponse(TypedDict):
    """Tokens of the prefix: in all, those that were cached before, and those pinned now."""

    prompt_tokens: NonNegative
    cached_tokens: NonNegative
    pinned_tokens: NonNegative
    ttl_seconds: NonNegative


class ForgetResponse(TypedDict):
    """Tokens that were dropped."""

    forgotten_tokens: NonNegative


@router.post(
    "/v1/cache/warm",
    summary="Compute and pin a prefix",
    operation_id="warm_cache",
    response_model=WarmResponse,
    responses=error_responses(429, body=True),
)
async def warm_cache(body: WarmRequest, request: Request, service: ServiceDep) -> Response:
    return json_response(await warm(service, body, request))


@router.post(
    "/v1/cache/forget",
    summary="Drop a prefix from the cache",
    operation_id="forget_cache",
    response_model=ForgetResponse,
    responses=error_responses(429, body=True),
)
async def forget_cache(body: PrefixRequest, request: Request, service: ServiceDep) -> Response:
    service.check_model(body.model, allow_adapters=False)
    prompt, caller = await _prompt(service, body, request), caller_of(request.scope)
    tenant = caller.tenant(body.cache_salt)
    dropping = service.engine.forget_prefix(prompt.tokens, tenant, caller.name)
    if service.response_cache is not None:  # which knows no prompts: all answers of the tenant
        service.response_cache.forget(tenant)
    forgotten: ForgetResponse = {"forgotten_tokens": await asyncio.wrap_future(dropping)}
    return json_response(forgotten)


async def warm(service: Service, body: WarmRequest, request: Request) -> WarmResponse:
    """Compute the prefix as a request of one token, and pin it within the key's bounds."""
    service.check_model(body.model)
    prompt = await _prompt(service, body, request)
    ttl_s = TTL_S[body.ttl or "5m"]
    policy = CachePolicy(pin_tokens=len(prompt.tokens), pin_ttl_s=ttl_s)
    options = RequestOptions(
        cache_salt=body.cache_salt, cache=policy, model=body.model, must_compute=True
    )
    sampling = Sampling(temperature=0.0, max_tokens=1)
    stream = service.submit(request, "warm", [prompt], sampling, options, streamed=False)
    async with cancel_on_disconnect(request.receive):
        await collect(stream)
    return {
        "prompt_tokens": len(prompt.tokens),
        "cached_tokens": sum(stream.cached_tokens),
        "pinned_tokens": stream.pinned_tokens,
        "ttl_seconds": int(ttl_s),
    }


def read_warm_prompts(path: Path) -> list[tuple[str, WarmRequest]]:
    """(name of an API key or "", body) of each line of a file. Raises BadInput."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("the file of --warm-prompts cannot be read", value=str(error)) from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                fields: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
                key = str(fields.pop("key", ""))
                prompts.append((key, WarmRequest.model_validate(fields)))
            except (ValidationError, *DECODE_ERRORS) as error:
                raise BadInput(
                    f"line {number} of --warm-prompts is no body of /v1/cache/warm",
                    value=str(error).splitlines()[0],
                    fix='write one JSON object a line: {"messages": […], "ttl": "1h"}',
                ) from None
    return prompts


async def warm_at_start(service: Service, prompts: list[tuple[str, WarmRequest]]) -> None:
    """Warm the prompts of a file, one after the other, each on the model that it names and for the
    tenant of its key."""

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()  # this client never disconnects
        return {}

    for key, body in prompts:
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": "/v1/cache/warm",
            "headers": [],
            CALLER: service.keys.caller_named(key),
        }
        await warm(service.group.find(body.model), body, Request(scope, receive))


async def _prompt(service: Service, body: PrefixRequest, request: Request) -> TokenPrompt:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "send either prompt or messages", param="prompt")
    reader = service.prompt_reader(request)
    if body.prompt is not None:
        return await reader.read(body.prompt)
    chat = ChatCompletionRequest(
        messages=body.messages or [], tools=body.tools, add_generation_prompt=False
    )
    return await chat_prompt(chat, reader)
