"""`/v1/completions`, `/v1/chat/completions` and `/v1/models`."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter, Request, Response
from msgspec.structs import replace

from ridgeline.serve.bodies.routing import JsonRoute
from ridgeline.serve.generation.respond import json_response, respond
from ridgeline.serve.openai.chat import cache_policy, submit_chat
from ridgeline.serve.openai.chat_stream import ChatCompletionStream
from ridgeline.serve.openai.completion_stream import CompletionStream
from ridgeline.serve.openai.objects import (
    AnthropicModel,
    AnthropicModelList,
    ChatCompletionResponse,
    CompletionResponse,
    ModelCard,
    ModelList,
)
from ridgeline.serve.openai.sampling_params import (
    completion_prompts,
    completion_sampling,
    is_score_only,
    request_options,
)
from ridgeline.serve.openai.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    check_supported,
)
from ridgeline.serve.openapi import error_responses, json_or_events
from ridgeline.serve.output_parsers.thinking import thinking_marks
from ridgeline.serve.service import Service, ServiceDep

router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)


@router.post(
    "/v1/completions",
    summary="Create a completion",
    operation_id="create_completion",
    response_model=CompletionResponse,
    responses=json_or_events("CompletionChunk") | error_responses(429, body=True),
)
async def create_completion(
    body: CompletionRequest, request: Request, service: ServiceDep
) -> Response:
    check_supported(body)
    model = service.check_model(body.model)
    tokenizer, streamed = service.engine.tokenizer, bool(body.stream)
    defaults, marks = service.engine.info.default_sampling, thinking_marks(service.options)
    sampling = completion_sampling(body, defaults, marks)
    prompts = await completion_prompts(body, service.prompt_reader(request))
    shortest = min(len(prompt.tokens) for prompt in prompts)
    options = replace(request_options(body), cache=cache_policy(body.cache_control, shortest))
    stream = service.submit(
        request,
        "cmpl",
        prompts,
        sampling,
        options,
        streamed=streamed,
        score_only=is_score_only(body),
    )
    timings = service.options.enable_per_request_metrics
    serializer = CompletionStream(body, stream, model, tokenizer, include_timings=timings)
    return await respond(request, stream, serializer, streamed=streamed)


@router.post(
    "/v1/chat/completions",
    summary="Create a chat completion",
    operation_id="create_chat_completion",
    response_model=ChatCompletionResponse,
    responses=json_or_events("ChatCompletionChunk") | error_responses(429, body=True),
)
async def create_chat_completion(
    body: ChatCompletionRequest, request: Request, service: ServiceDep
) -> Response:
    model = service.check_model(body.model)
    streamed = bool(body.stream)
    stream, output_format = await submit_chat(service, request, "chatcmpl", body, streamed=streamed)
    serializer = ChatCompletionStream(
        body,
        stream,
        model,
        service.engine.tokenizer,
        output_format,
        include_timings=service.options.enable_per_request_metrics,
    )
    return await respond(request, stream, serializer, streamed=streamed)


@router.get(
    "/v1/models",
    summary="List the served models",
    operation_id="list_models",
    response_model=ModelList,
    responses=error_responses(),
)
async def list_models(request: Request, service: ServiceDep) -> Response:
    cards = [_model_card(own, name) for own in service.group.services for name in own.own_names]
    if _asks_as_anthropic(request):
        listed = [_anthropic_model(card) for card in cards]
        page: AnthropicModelList = {
            "data": listed, "has_more": False, "first_id": cards[0]["id"],
            "last_id": cards[-1]["id"],
        }  # fmt: skip
        return json_response(page)
    models: ModelList = {"object": "list", "data": cards}
    return json_response(models)


@router.get(
    "/v1/models/{name:path}",
    summary="Describe a served model",
    operation_id="get_model",
    response_model=ModelCard,
    responses=error_responses(404),
)
async def get_model(name: str, request: Request, service: ServiceDep) -> Response:
    own = service.group.find(name)
    card = _model_card(own, own.check_model(name))
    return json_response(_anthropic_model(card) if _asks_as_anthropic(request) else card)


def _asks_as_anthropic(request: Request) -> bool:
    """Whether the request has the header that Anthropic's API requires of every request."""
    return "anthropic-version" in request.headers


def _anthropic_model(card: ModelCard) -> AnthropicModel:
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": datetime.fromtimestamp(card["created"], UTC).isoformat(),
        "max_input_tokens": card["max_model_len"],
    }


def _model_card(service: Service, name: str) -> ModelCard:
    """The base model, or an adapter of it."""
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "ridgeline",
        "root": name,
        "parent": None if name == service.name else service.name,
        "max_model_len": service.engine.info.max_model_len,
    }
