"""`/v1/completions`, `/v1/chat/completions` and `/v1/models`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serve.generation.respond import OpenAiVoice, answer, usage_wanted
from ridgeline.serve.openai.chat_stream import ChatVoice
from ridgeline.serve.openai.completion_stream import CompletionVoice
from ridgeline.serve.openai.sampling_params import (
    chat_prompt,
    chat_sampling,
    completion_prompts,
    completion_sampling,
    scores_only,
)
from ridgeline.serve.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    Sampled,
    ignored_fields,
    read,
)
from ridgeline.serve.output_parsers.select import Dialect, dialect_of
from ridgeline.serve.service import Order, Service, Wish, to_json


async def complete(service: Service, request: Request) -> Response:
    """POST /v1/completions."""
    asked = read(CompletionRequest, await service.body(request))
    service.check_model(asked.model)
    sampling = completion_sampling(asked, service.caps)
    prompts = await completion_prompts(asked, service.engine.tokenizer, service.caps)
    order = service.order(
        request, "cmpl", prompts, sampling, wish_of(asked), scores_only=scores_only(asked)
    )
    job = order.job
    wording = CompletionVoice(asked, job, service.engine.tokenizer)
    wanted = usage_wanted(asked, service.options.enable_per_request_metrics)
    voice = OpenAiVoice(wording, job, service.name, wanted)
    stream = bool(asked.stream)
    return await answer(
        request, job, service.group(job, stream=stream), voice, stream=stream, headers=order.headers
    )


async def chat(service: Service, request: Request) -> Response:
    """POST /v1/chat/completions."""
    asked = read(ChatRequest, await service.body(request))
    service.check_model(asked.model)
    order, dialect = await chat_order(service, request, "chatcmpl", asked)
    job = order.job
    wording = ChatVoice(asked, job, service.engine.tokenizer, dialect)
    wanted = usage_wanted(asked, service.options.enable_per_request_metrics)
    voice = OpenAiVoice(wording, job, service.name, wanted)
    stream = bool(asked.stream)
    return await answer(
        request, job, service.group(job, stream=stream), voice, stream=stream, headers=order.headers
    )


async def chat_order(
    service: Service, request: Request, kind: str, asked: ChatRequest
) -> tuple[Order, Dialect]:
    """A conversation as a job, and how to read its answer."""
    dialect = dialect_of(asked, service.options, service.caps)
    sampling = chat_sampling(asked, service.caps, dialect.structured)
    prompts = [await chat_prompt(asked, service.engine.tokenizer, service.caps)]
    unused = ("stop",) if dialect.structured and asked.stop else ()
    return service.order(request, kind, prompts, sampling, wish_of(asked, unused)), dialect


async def models(service: Service, _request: Request) -> Response:
    """GET /v1/models."""
    return to_json({"object": "list", "data": [_card(service)]})


async def model(service: Service, request: Request) -> Response:
    """GET /v1/models/NAME."""
    service.check_model(request.path_params["name"])
    return to_json(_card(service))


def wish_of(asked: Sampled, unused: tuple[str, ...] = ()) -> Wish:
    """How a request of the OpenAI family wants to be served. `unused`: fields that mean nothing
    beside its others."""
    return Wish(
        priority=asked.priority,
        cache_salt=asked.cache_salt,
        slo_class=asked.slo_class,
        timeout_ms=asked.timeout_ms,
        request_id=asked.request_id,
        ignored=ignored_fields(asked) + unused,
    )


def _card(service: Service) -> dict[str, object]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "ridgeline",
        "root": service.name,
        "parent": None,
        "max_model_len": service.engine.info.max_model_len,
    }
