"""From a request body to what the engine takes: prompts as token ids, and one `Sampling`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from ridgeline.records import Sampling, Structured
from ridgeline.serve.config import Caps
from ridgeline.serve.engine_protocol import Tokenizer
from ridgeline.serve.errors import ApiError
from ridgeline.serve.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    Message,
    Sampled,
    ToolCall,
)
from ridgeline.serve.openai.structured_output import structured_of

_LONG_TEXT = 20_000  # characters from which tokenising would be felt by the event loop

_SAME_NAME = {
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "seed", "include_stop_str_in_output", "ignore_eos",
    "min_tokens", "prompt_logprobs", "skip_special_tokens",
}  # fmt: skip


class Prompt(msgspec.Struct, frozen=True):
    """One prompt: its token ids, and the text that they were made of, if they were."""

    tokens: tuple[int, ...]
    text: str | None = None


def completion_sampling(request: CompletionRequest, caps: Caps) -> Sampling:
    """The sampling of a completion; `max_tokens` is 16 unless it is sent.

    `echo` with `max_tokens` 0 scores a prompt: one token is computed (the logits of the prompt
    come with it) and dropped from the answer.
    """
    given = _shared(request, caps)
    given["logprobs"] = request.logprobs
    if request.echo and request.logprobs is not None:
        given["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    limit = _max_tokens(request)
    if limit is not None:
        given["max_tokens"] = 1 if scores_only(request) else limit
    return Sampling(**given)


def scores_only(request: CompletionRequest) -> bool:
    """True where the client wants the prompt back with its log-probabilities, and no new token."""
    return bool(request.echo) and _max_tokens(request) == 0


def chat_sampling(
    request: ChatRequest, caps: Caps, called_for: Structured | None = None
) -> Sampling:
    """The sampling of a chat; without a limit it may run to the end of the context.

    `called_for`: the grammar that the request's tools call for. Stop strings are looked for in what
    is said, and an answer that is nothing but calls says nothing: they would cut its JSON.
    """
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs = true", param="top_logprobs")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    shared = _shared(request, caps)
    if called_for is not None:
        if "structured" in shared:
            message = "tool_choice and a format for the answer contradict each other"
            raise ApiError(400, message, param="tool_choice")
        shared["structured"] = called_for
        shared.pop("stop", None)
    return Sampling(**shared, logprobs=logprobs, max_tokens=_max_tokens(request))


async def completion_prompts(
    request: CompletionRequest, tokenizer: Tokenizer, caps: Caps
) -> list[Prompt]:
    """Every prompt of the request as token ids."""
    specials = request.add_special_tokens is not False
    entries = entries_of(request.prompt) or [""]
    check_cap("prompt", len(entries), caps.max_prompts, "prompts")
    num_choices = len(entries) * (request.n or 1)
    check_cap("prompt", num_choices, caps.max_choices, "choices (prompts x n)")
    prompts = [await prompt_of(entry, tokenizer, specials) for entry in entries]
    return [_truncated(prompt, request.truncate_prompt_tokens) for prompt in prompts]


async def chat_prompt(request: ChatRequest, tokenizer: Tokenizer, caps: Caps) -> Prompt:
    """The conversation through the model directory's chat template."""
    check_cap("messages", len(request.messages), caps.max_messages, "messages")
    messages = [_plain(message) for message in request.messages]
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        message = "continue_final_message excludes add_generation_prompt"
        raise ApiError(400, message, param="continue_final_message")
    asks = request.add_generation_prompt is not False and not continues
    tools = tools_offered(request)
    variables = _template_variables(request)
    tokens = await _maybe_in_thread(
        sum(len(message["content"] or "") for message in messages),
        lambda: tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=asks,
            tools=tools,
            variables=variables,
            continue_final_message=continues,
        ),
    )
    return _truncated(Prompt(tuple(tokens)), request.truncate_prompt_tokens)


def tools_offered(request: ChatRequest) -> list[dict[str, Any]] | None:
    """What the template may tell the model of; none where the request forbids calling."""
    if not request.tools or request.tool_choice == "none":
        return None
    return [tool.model_dump(exclude_none=True) for tool in request.tools]


def _template_variables(request: ChatRequest) -> dict[str, Any]:
    """`chat_template_kwargs`, and what `reasoning_effort` means to templates that know it."""
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
        variables.setdefault("enable_thinking", request.reasoning_effort != "none")
    return variables


def _truncated(prompt: Prompt, num_tokens: int | None) -> Prompt:
    """Only the last `num_tokens` of it."""
    if num_tokens is None or len(prompt.tokens) <= num_tokens:
        return prompt
    return Prompt(prompt.tokens[-num_tokens:])


def check_cap(name: str, number: int, limit: int, what: str) -> None:
    """ApiError 400 where a request asks for more than `limit` of something."""
    if number > limit:
        message = f"{name}: too many {what}: {number}; limit: {limit}; fix: send several requests"
        raise ApiError(400, message, param=name)


def _check_caps(request: Sampled, caps: Caps) -> None:
    check_cap("n", request.n or 1, caps.max_n, "choices")
    if stops := [request.stop] if isinstance(request.stop, str) else request.stop:
        check_cap("stop", len(stops), caps.max_stop, "stop strings")
        longest = max(map(len, stops))
        check_cap("stop", longest, caps.max_stop_chars, "characters in a stop string")
    if request.logit_bias:
        check_cap("logit_bias", len(request.logit_bias), caps.max_logit_bias, "entries")
    for name in ("stop_token_ids", "allowed_token_ids"):
        if ids := getattr(request, name):
            check_cap(name, len(ids), caps.max_token_ids, "token ids")


def _shared(request: Sampled, caps: Caps) -> dict[str, Any]:
    _check_caps(request, caps)
    given = {name: getattr(request, name) for name in _SAME_NAME & request.model_fields_set}
    stop = request.stop
    if stop is not None:
        given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    for name in ("stop_token_ids", "allowed_token_ids"):
        if getattr(request, name) is not None:
            given[name] = tuple(getattr(request, name))
    given["structured"] = structured_of(request, caps.max_grammar_bytes)
    return {name: value for name, value in given.items() if value is not None}


def _max_tokens(request: CompletionRequest | ChatRequest) -> int | None:
    newer = request.max_completion_tokens
    return request.max_tokens if newer is None else newer


def entries_of(prompt: str | Sequence[Any]) -> list[str | list[int]]:
    """The four shapes of `prompt` as a list of texts or token lists."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[*prompt]]
    return list(prompt)


async def prompt_of(
    entry: str | list[int], tokenizer: Tokenizer, specials: bool, *, name: str = "prompt"
) -> Prompt:
    """One text or token list as a prompt; ApiError 400 where it is empty."""
    if not entry:
        raise ApiError(400, f"{name} is empty; fix: send at least one token of text", param=name)
    if isinstance(entry, str):
        prompt = await text_prompt(entry, tokenizer, specials)
        if not prompt.tokens:
            raise ApiError(400, f"{name} holds no token", param=name)
        return prompt
    return Prompt(tuple(entry))


async def text_prompt(text: str, tokenizer: Tokenizer, specials: bool) -> Prompt:
    """A text as a prompt."""
    tokens = await _maybe_in_thread(
        len(text), lambda: tokenizer.encode(text, add_special_tokens=specials)
    )
    return Prompt(tuple(tokens), text)


async def _maybe_in_thread(num_chars: int, work: Any) -> list[int]:
    """Short texts are tokenised at once; long ones where the event loop does not wait for them."""
    if num_chars < _LONG_TEXT:
        return list(work())
    return list(await asyncio.to_thread(work))


def _plain(message: Message) -> dict[str, Any]:
    """The message with its text parts joined by newlines, as templates expect it."""
    content = message.content
    text = "\n".join(part.text for part in content) if isinstance(content, list) else content
    plain = {**(message.model_extra or {}), "role": message.role, "content": text}
    if message.tool_calls:
        plain["tool_calls"] = [_called(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _called(call: ToolCall) -> dict[str, Any]:
    """A call as templates expect it: its arguments as a value, where they are JSON."""
    try:
        arguments: Any = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = call.function.arguments
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
