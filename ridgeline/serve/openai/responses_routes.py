"""`POST /v1/responses`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ridgeline.serve.bodies.routing import JsonRoute
from ridgeline.serve.generation.respond import respond
from ridgeline.serve.openai.chat import submit_chat
from ridgeline.serve.openai.objects import ResponseObject
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
        ignored_fields=sorted(dropped_fields(body)),
    )
    serializer = ResponsesStream(body, stream, model, output_format)
    return await respond(request, stream, serializer, streamed=streamed)
