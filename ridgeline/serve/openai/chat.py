"""A conversation as a generation: for chat completions, and for the APIs that translate to them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from fastapi import Request

from ridgeline.config.server import ServerOptions
from ridgeline.records import CachePolicy
from ridgeline.serve.config import LIMITS
from ridgeline.serve.context.reduce import ContextReduction, reduce_documents
from ridgeline.serve.engine_protocol import ServedEngine, ServedTokenizer
from ridgeline.serve.errors import ApiError, check_limit
from ridgeline.serve.generation.prompt_reader import PromptReader
from ridgeline.serve.generation.request import ComparedMessage, TokenPrompt
from ridgeline.serve.generation.stream import ResponseStream
from ridgeline.serve.openai.sampling_params import (
    chat_prompt,
    chat_sampling,
    document_texts,
    offered_tools,
    request_options,
    starts_in_reasoning,
    with_thinking,
)
from ridgeline.serve.openai.schemas import (
    AllowedToolChoice,
    CacheControlParam,
    ChatCompletionRequest,
    DocumentParam,
    NamedToolChoice,
    check_supported,
)
from ridgeline.serve.output_parsers.select import (
    ForcedTool,
    OutputFormat,
    ToolChoice,
    select_output_format,
)
from ridgeline.serve.output_parsers.thinking import thinking_marks
from ridgeline.serve.service import Service

TTL_S = {"5m": 300.0, "1h": 3600.0}
"""Seconds of each time to live of `cache_control`."""
NEAR = 0.8
"""Jaccard index from which on passages are near duplicates, unless the request says otherwise."""

_SAME_ANSWER = {
    *("model", "stream", "stream_options", "request_id", "priority", "timeout_ms", "slo_class"),
    *("cache_salt", "user", "metadata"),
}
"""Fields that do not change an answer, or that its place in the cache has in another form."""


class Translation(msgspec.Struct, frozen=True, kw_only=True):
    """What the API that a chat was translated from calls its fields.

    `ignored_fields`: fields of its body that have no effect. `thinking_budget`: the field of a
    thinking budget, and its tokens; the field is ignored where the budget cannot be kept.
    `calls_field`: where the conversation has its tool calls.
    """

    ignored_fields: Sequence[str] = ()
    thinking_budget: tuple[str, int] | None = None
    calls_field: str = "messages.tool_calls"


NO_TRANSLATION = Translation()


async def submit_chat(
    service: Service,
    request: Request,
    id_prefix: str,
    body: ChatCompletionRequest,
    *,
    streamed: bool,
    translation: Translation = NO_TRANSLATION,
) -> tuple[ResponseStream, OutputFormat]:
    """The stream of a conversation's response, and how to parse it."""
    check_supported(body)
    tokenizer = service.engine.tokenizer
    output_format = chat_output_format(body, service.options)
    sampling = chat_sampling(body, output_format, tokenizer, service.engine.info.default_sampling)
    body, headers = await reduce_context(service, request, body)
    reader, max_model_len = service.prompt_reader(request), service.engine.info.max_model_len
    body, prompt = await fitting_chat(body, reader, max_model_len)
    if output_format.reads_reasoning:
        if sampling.structured is None:
            default = service.options.reasoning_parser == "think_open"
            begins = starts_in_reasoning(body, prompt, tokenizer, default=default)
        else:
            grammar, begins = with_thinking(sampling.structured, body, prompt, tokenizer)
            sampling = msgspec.structs.replace(sampling, structured=grammar)
        output_format = msgspec.structs.replace(output_format, begins_in_reasoning=begins)
    without_effect = [*translation.ignored_fields]
    if translation.thinking_budget is not None:
        name, num_tokens = translation.thinking_budget
        marks = output_format.thinking_marks
        if marks is None or sampling.is_masked:
            without_effect.append(name)
        else:
            sampling = msgspec.structs.replace(
                sampling, thinking_token_budget=num_tokens, thinking_marks=marks
            )
    if output_format.begins_in_reasoning and sampling.thinking_token_budget is not None:
        marks = msgspec.structs.replace(sampling.thinking_marks, is_open=True)
        sampling = msgspec.structs.replace(sampling, thinking_marks=marks)
    if output_format.grammar is not None and body.stop:
        without_effect.append("stop")
    if output_format.call_format is not None and not tokenizer.template_uses_tools:
        without_effect.append("tools")  # the template leaves them out: the model cannot know them
    if not tokenizer.template_uses_calls and any(m.tool_calls for m in body.messages):
        without_effect.append(translation.calls_field)
    options = msgspec.structs.replace(request_options(body, without_effect), headers=headers)
    prediction = await predicted_tokens(body, tokenizer)
    cache = await chat_cache_policy(body, prompt.tokens, service.engine)
    options = msgspec.structs.replace(options, prediction=prediction, cache=cache)
    message = compared_message(body) if service.compares_questions else None
    if message is not None:
        question = await service.read_question(request, prompt, sampling, options, message)
        options = msgspec.structs.replace(options, question=question)
    stream = service.submit(request, id_prefix, [prompt], sampling, options, streamed=streamed)
    return stream, output_format


async def fitting_chat(
    body: ChatCompletionRequest, reader: PromptReader, max_model_len: int
) -> tuple[ChatCompletionRequest, TokenPrompt]:
    """The conversation and its prompt.

    With `truncation: "auto"` the oldest turns are dropped that leave the answer no room. A turn
    begins with a user's message, so that a tool's result never comes without its call; the last
    turn and system messages at the start stay.
    """
    if body.truncation != "auto":
        return body, await chat_prompt(body, reader)
    if body.truncate_prompt_tokens is not None:
        message = 'truncation = "auto" excludes truncate_prompt_tokens; fix: send one of them'
        raise ApiError(400, message, param="truncation")
    max_tokens = max_model_len - (body.max_completion_tokens or body.max_tokens or 1)
    prompt = await chat_prompt(body, reader, is_cut=True)
    num_charged, free = prompt.num_charged, reader.without_charge()
    shorter = _shorter_chats(body)
    first, end = 0, len(shorter) if len(prompt.tokens) > max_tokens else 0
    while first < end:
        middle = (first + end) // 2
        shorter_prompt = await chat_prompt(shorter[middle], free, is_cut=True)
        is_fitting = len(shorter_prompt.tokens) <= max_tokens
        if is_fitting or middle == len(shorter) - 1:
            body, prompt = shorter[middle], shorter_prompt
        first, end = (first, middle) if is_fitting else (middle + 1, end)
    return body, msgspec.structs.replace(prompt, num_charged=num_charged)


def _shorter_chats(body: ChatCompletionRequest) -> list[ChatCompletionRequest]:
    """The conversation without its oldest turn, without its two oldest, and so on."""
    messages = body.messages
    is_system = [message.role in ("system", "developer") for message in messages]
    num_system = is_system.index(False) if False in is_system else len(messages)
    starts = [i for i, m in enumerate(messages) if m.role == "user" and i > num_system]
    return [
        body.model_copy(update={"messages": [*messages[:num_system], *messages[start:]]})
        for start in starts
    ]


async def reduce_context(
    service: Service, request: Request, body: ChatCompletionRequest
) -> tuple[ChatCompletionRequest, dict[str, str]]:
    """The conversation with its documents reduced, and headers that say so."""
    wanted, documents = body.context_reduction, body.documents or []
    check_limit("documents", len(documents), LIMITS.max_documents, "documents")
    if wanted is None:
        return body, {}
    if not documents:
        message = "context_reduction needs documents; fix: send them, or leave it out"
        raise ApiError(400, message, param="context_reduction")
    if wanted.similarity is not None and wanted.deduplicate != "near":
        message = "context_reduction: similarity needs deduplicate = near"
        raise ApiError(400, message, param="context_reduction")
    if wanted.keep_unit is not None and wanted.keep_ratio is None:
        message = "context_reduction: keep_unit needs keep_ratio"
        raise ApiError(400, message, param="context_reduction")
    similarity = {None: None, "exact": 1.0, "near": wanted.similarity or NEAR}[wanted.deduplicate]
    reduction = ContextReduction(
        similarity=similarity,
        is_ordered=wanted.order == "canonical",
        keep_ratio=1.0 if wanted.keep_ratio is None else wanted.keep_ratio,
        unit=wanted.keep_unit or "sentence",
    )
    texts, options = document_texts(body), request_options(body)
    reduced = await reduce_documents(service, request, texts, reduction, options)
    left: list[str | DocumentParam] = []
    for index, text in zip(reduced.indices, reduced.texts, strict=True):
        own = documents[index]
        left.append(text if isinstance(own, str) else own.model_copy(update={"text": text}))
    changes = {"documents": left, "context_reduction": None}
    return body.model_copy(update=changes), reduced.header


def compared_message(body: ChatCompletionRequest) -> ComparedMessage | None:
    """The last message, by whose meaning a stored answer may be found; None for one that is not a
    user's, and in chats with tools."""
    last = body.messages[-1]
    if last.role != "user" or last.content is None or body.tools or body.continue_final_message:
        return None
    content = last.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    emptied = last.model_copy(update={"content": ""})
    rest = body.model_copy(update={"messages": [*body.messages[:-1], emptied]})
    return ComparedMessage(text, rest.model_dump_json(exclude=_SAME_ANSWER).encode())


async def predicted_tokens(
    body: ChatCompletionRequest, tokenizer: ServedTokenizer
) -> tuple[int, ...]:
    """The tokens of the predicted output; empty without one."""
    if body.prediction is None or not (text := body.prediction.text):
        return ()
    limit = LIMITS.max_prediction_chars
    check_limit("prediction", len(text), limit, "characters in a predicted output")
    return tuple(await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=False))


def chat_output_format(body: ChatCompletionRequest, options: ServerOptions) -> OutputFormat:
    """How to parse the response; ApiError 400 if its tools cannot be served as requested."""
    choice: ToolChoice
    if isinstance(body.tool_choice, NamedToolChoice):
        choice = ForcedTool(body.tool_choice.function.name)
    elif isinstance(body.tool_choice, AllowedToolChoice):
        choice = body.tool_choice.allowed_tools.mode
    else:
        choice = body.tool_choice or "auto"
    output_format = select_output_format(
        offered_tools(body),
        choice,
        options,
        parallel_calls=body.parallel_tool_calls is not False,
        include_reasoning=body.include_reasoning is not False,
    )
    return msgspec.structs.replace(output_format, thinking_marks=thinking_marks(options))


def cache_policy(control: CacheControlParam | None, num_tokens: int) -> CachePolicy | None:
    """The policy of a prompt, of which `num_tokens` may be pinned; None without a `cache_control`.

    Tokens beyond `max_tokens` cannot be found by later requests.
    """
    if control is None:
        return None
    if control.type == "no_store":
        if control.ttl is not None or control.max_tokens is not None:
            message = "cache_control: ttl and max_tokens have no effect with no_store"
            raise ApiError(400, f"{message}; fix: leave them out", param="cache_control")
        return CachePolicy(max_cached_tokens=0)
    limit = control.max_tokens
    return CachePolicy(
        pin_tokens=num_tokens if limit is None else min(limit, num_tokens),
        pin_ttl_s=TTL_S[control.ttl or "5m"],
        max_cached_tokens=limit,
    )


async def chat_cache_policy(
    body: ChatCompletionRequest, tokens: Sequence[int], engine: ServedEngine
) -> CachePolicy | None:
    """The policy of a conversation, whose pinned part may end after some of its messages."""
    control = body.cache_control
    if control is None or control.num_messages is None:
        return cache_policy(control, len(tokens))
    kept = max(1, min(control.num_messages, len(body.messages)))
    changes = {
        "messages": body.messages[:kept],
        "add_generation_prompt": False,
        "continue_final_message": None,
        "truncate_prompt_tokens": None,
        "truncation": None,
    }
    # The tokens were charged with the whole prompt, of which these are the beginning.
    reader = PromptReader(engine.tokenizer, engine.info.max_model_len, lambda _: None)
    try:
        beginning = (await chat_prompt(body.model_copy(update=changes), reader)).tokens
    except Exception:  # a template that takes no such beginning: the whole prompt is pinned
        return cache_policy(control, len(tokens))
    pairs = enumerate(zip(beginning, tokens, strict=False))
    shared = next((i for i, (a, b) in pairs if a != b), min(len(beginning), len(tokens)))
    return cache_policy(control, shared)
