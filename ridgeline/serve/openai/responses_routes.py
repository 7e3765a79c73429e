"""`/v1/responses`: create one, and count its input. None is stored."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ridgeline.serve.bodies.routing import JsonRoute
from ridgeline.serve.errors import ApiError
from ridgeline.serve.generation.respond import json_response, respond
from ridgeline.serve.openai.chat import (
    Translation,
    chat_output_format,
    fitting_chat,
    submit_chat,
)
from ridgeline.serve.openai.objects import InputTokenCount, ResponseObject
from ridgeline.serve.openai.responses_schemas import ResponsesRequest, to_chat
from ridgeline.serve.openai.responses_stream import ResponsesStream
from ridgeline.serve.openai.schemas import dropped_fields
from ridgeline.serve.openapi import error_responses, json_or_events
from ridgeline.serve.service import ServiceDep

router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)


@router.post(
    "/v1/responses",
    summary="Create a response",
    operation_id="create_response",
    response_model=ResponseObject,
    responses=json_or_events("ResponseEvent") | error_responses(429, body=True),
)
async def create_response(
    body: ResponsesRequest, request: Request, service: ServiceDep
) -> Response:
    model = service.check_model(body.model)
    streamed = bool(body.stream)
    stream, output_format = await submit_chat(
        service,
        request,
        "resp",
        to_chat(body),
        streamed=streamed,
        translation=Translation(
            ignored_fields=sorted(dropped_fields(body)), calls_field="input.function_call"
        ),
    )
    serializer = ResponsesStream(body, stream, model, output_format)
    return await respond(request, stream, serializer, streamed=streamed)


@router.post(
    "/v1/responses/input_tokens",
    summary="Count the input tokens of a response",
    operation_id="count_response_tokens",
    response_model=InputTokenCount,
    responses=error_responses(body=True),
)
async def count_input_tokens(
    body: ResponsesRequest, request: Request, service: ServiceDep
) -> Response:
    service.check_model(body.model)
    chat = to_chat(body)
    chat_output_format(chat, service.options)  # refuses what `create_response` would refuse
    reader = service.prompt_reader(request)
    _, prompt = await fitting_chat(chat, reader, service.engine.info.max_model_len)
    count: InputTokenCount = {
        "object": "response.input_tokens",
        "input_tokens": len(prompt.tokens),
    }
    return json_response(count)


@router.get("/v1/responses/{response_id}", include_in_schema=False)
@router.delete("/v1/responses/{response_id}", include_in_schema=False)
@router.get("/v1/responses/{response_id}/input_items", include_in_schema=False)
@router.post("/v1/responses/{response_id}/cancel", include_in_schema=False)
async def refuse_stored_response(response_id: str) -> Response:
    message = "this server stores no responses; fix: keep what POST /v1/responses returns"
    raise ApiError(404, message, param="response_id")
