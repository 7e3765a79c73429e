"""A conversation as a generation: for chat completions, and for the APIs that translate to them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from fastapi import Request

from ridgeline.config.server import ServerOptions
from ridgeline.records import CachePolicy
from ridgeline.serve.config import LIMITS
from ridgeline.serve.engine_protocol import ServedEngine, ServedTokenizer
from ridgeline.serve.errors import ApiError, check_limit
from ridgeline.serve.generation.prompt_reader import PromptReader
from ridgeline.serve.generation.stream import ResponseStream
from ridgeline.serve.openai.sampling_params import (
    chat_prompt,
    chat_sampling,
    offered_tools,
    request_options,
    starts_in_reasoning,
)
from ridgeline.serve.openai.schemas import (
    CacheControlParam,
    ChatCompletionRequest,
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


async def submit_chat(
    service: Service,
    request: Request,
    id_prefix: str,
    body: ChatCompletionRequest,
    *,
    streamed: bool,
    ignored_fields: Sequence[str] = (),
    thinking_budget: tuple[str, int] | None = None,
) -> tuple[ResponseStream, OutputFormat]:
    """The stream of a conversation's response, and how to parse it.

    `ignored_fields`: fields of the body that this one was translated from, `thinking_budget` one
    whose thinking budget is ignored where it cannot be kept.
    """
    check_supported(body)
    tokenizer = service.engine.tokenizer
    output_format = chat_output_format(body, service.options)
    sampling = chat_sampling(body, output_format, tokenizer, service.engine.info.default_sampling)
    prompt = await chat_prompt(body, service.prompt_reader(request))
    if output_format.reads_reasoning and sampling.structured is None:
        default = service.options.reasoning_parser == "think_open"
        begins = starts_in_reasoning(body, prompt, tokenizer, default=default)
        output_format = msgspec.structs.replace(output_format, begins_in_reasoning=begins)
    without_effect = [*ignored_fields]
    if thinking_budget is not None:
        name, num_tokens = thinking_budget
        marks = output_format.thinking_marks
        if marks is None or sampling.is_masked:
            without_effect.append(name)
        else:
            sampling = msgspec.structs.replace(
                sampling, thinking_token_budget=num_tokens, thinking_marks=marks
            )
    if output_format.grammar is not None and body.stop:
        without_effect.append("stop")
    if output_format.call_format is not None and not tokenizer.template_uses_tools:
        without_effect.append("tools")  # the template leaves them out: the model cannot know them
    options = request_options(body, without_effect)
    prediction = await predicted_tokens(body, tokenizer)
    cache = await chat_cache_policy(body, prompt.tokens, service.engine)
    options = msgspec.structs.replace(options, prediction=prediction, cache=cache)
    stream = service.submit(request, id_prefix, [prompt], sampling, options, streamed=streamed)
    return stream, output_format


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
