"""A conversation as a generation: for chat completions, and for the APIs that translate to them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from fastapi import Request

from ridgeline.config.server import ServerOptions
from ridgeline.serve.config import LIMITS
from ridgeline.serve.engine_protocol import ServedTokenizer
from ridgeline.serve.errors import check_limit
from ridgeline.serve.generation.stream import ResponseStream
from ridgeline.serve.openai.sampling_params import (
    chat_prompt,
    chat_sampling,
    offered_tools,
    request_options,
    starts_in_reasoning,
)
from ridgeline.serve.openai.schemas import (
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
    options = msgspec.structs.replace(options, prediction=await predicted_tokens(body, tokenizer))
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
