"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ridgeline.serve.anthropic.schemas import (
    CountTokensRequest,
    MessageResponse,
    MessagesRequest,
    TokenCount,
    ignored_fields,
    to_chat,
)
from ridgeline.serve.anthropic.stream import MessageStream
from ridgeline.serve.bodies.routing import JsonRoute
from ridgeline.serve.generation.respond import json_response, respond
from ridgeline.serve.openai.chat import Translation, chat_output_format, submit_chat
from ridgeline.serve.openai.sampling_params import chat_prompt
from ridgeline.serve.openapi import error_responses, json_or_events
from ridgeline.serve.service import ServiceDep

router = APIRouter(tags=["Anthropic"], route_class=JsonRoute)


@router.post(
    "/v1/messages",
    summary="Create a message",
    operation_id="create_message",
    response_model=MessageResponse,
    responses=json_or_events("MessageEvent") | error_responses(429, body=True, anthropic=True),
)
async def create_message(body: MessagesRequest, request: Request, service: ServiceDep) -> Response:
    model = service.check_model(body.model)
    streamed = bool(body.stream)
    budget = body.thinking.budget_tokens if body.thinking is not None else None
    stream, output_format = await submit_chat(
        service,
        request,
        "msg",
        to_chat(body),
        streamed=streamed,
        translation=Translation(
            ignored_fields=ignored_fields(body),
            thinking_budget=None if budget is None else ("thinking.budget_tokens", budget),
            calls_field="messages.content.tool_use",
        ),
    )
    serializer = MessageStream(stream, model, output_format)
    response = await respond(request, stream, serializer, streamed=streamed)
    response.headers["request-id"] = response.headers["x-request-id"]
    return response


@router.post(
    "/v1/messages/count_tokens",
    summary="Count the tokens of a message",
    operation_id="count_message_tokens",
    response_model=TokenCount,
    responses=error_responses(body=True, anthropic=True),
)
async def count_tokens(body: CountTokensRequest, request: Request, service: ServiceDep) -> Response:
    service.check_model(body.model)
    chat = to_chat(body)
    chat_output_format(chat, service.options)  # refuses what `create_message` would refuse
    prompt = await chat_prompt(chat, service.prompt_reader(request))
    count: TokenCount = {"input_tokens": len(prompt.tokens)}
    return json_response(count)
