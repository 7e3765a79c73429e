"""From a request body to what the engine takes: prompts as token ids, and one `Sampling`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from ridgeline.records import Sampling
from ridgeline.serve.contract import Tokenizer
from ridgeline.serve.errors import ApiError
from ridgeline.serve.requests import ChatRequest, CompletionRequest, Message

MAX_CHOICES = 4096
_LONG_TEXT = 20_000  # characters from which tokenising would be felt by the event loop

_SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "seed", "include_stop_str_in_output", "ignore_eos",
    "min_tokens", "prompt_logprobs", "skip_special_tokens",
)  # fmt: skip


class Prompt(msgspec.Struct, frozen=True):
    """One prompt: its token ids, and its text (for `echo`) as the client would recognise it."""

    tokens: tuple[int, ...]
    text: str


def completion_sampling(request: CompletionRequest) -> Sampling:
    """The sampling of a completion; `max_tokens` is 16 unless it is sent.

    `echo` with `max_tokens` 0 scores a prompt: one token is computed (the logits of the prompt
    come with it) and dropped from the answer.
    """
    given = _shared(request)
    given["logprobs"] = request.logprobs
    if request.echo and request.logprobs is not None:
        given["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    if "max_tokens" in request.model_fields_set or request.max_completion_tokens is not None:
        limit = _max_tokens(request)
        given["max_tokens"] = 1 if scores_only(request) else limit
    return Sampling(**given)


def scores_only(request: CompletionRequest) -> bool:
    """True where the client wants the prompt back with its log-probabilities, and no new token."""
    return bool(request.echo) and _max_tokens(request) == 0


def chat_sampling(request: ChatRequest) -> Sampling:
    """The sampling of a chat; without a limit it may run to the end of the context."""
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs = true", param="top_logprobs")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return Sampling(**_shared(request), logprobs=logprobs, max_tokens=_max_tokens(request))


async def completion_prompts(request: CompletionRequest, tokenizer: Tokenizer) -> list[Prompt]:
    """Every prompt of the request as token ids."""
    specials = request.add_special_tokens is not False
    entries = _entries(request.prompt) or [""]
    if len(entries) * (request.n or 1) > MAX_CHOICES:
        raise ApiError(
            400,
            f"too many choices in one request: {len(entries)} prompts x n = {request.n or 1}; "
            f"limit: {MAX_CHOICES}; fix: send several requests",
            param="prompt",
        )
    return [await _prompt(entry, tokenizer, specials) for entry in entries]


async def chat_prompt(request: ChatRequest, tokenizer: Tokenizer) -> Prompt:
    """The conversation through the model directory's chat template."""
    messages = [_plain(message) for message in request.messages]
    ask_for_answer = request.add_generation_prompt is not False
    tokens = await _maybe_in_thread(
        sum(len(message["content"]) for message in messages),
        lambda: tokenizer.apply_chat_template(messages, add_generation_prompt=ask_for_answer),
    )
    return Prompt(tuple(tokens), "")


def _shared(request: CompletionRequest | ChatRequest) -> dict[str, Any]:
    given = {name: getattr(request, name) for name in _SAME_NAME}
    stop = request.stop
    if stop is not None:
        given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if request.stop_token_ids is not None:
        given["stop_token_ids"] = tuple(request.stop_token_ids)
    return {name: value for name, value in given.items() if value is not None}


def _max_tokens(request: CompletionRequest | ChatRequest) -> int | None:
    newer = request.max_completion_tokens
    return request.max_tokens if newer is None else newer


def _entries(prompt: str | Sequence[Any]) -> list[str | list[int]]:
    """The four shapes of `prompt` as a list of texts or token lists."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[int(token) for token in prompt]]
    return list(prompt)


async def _prompt(entry: str | list[int], tokenizer: Tokenizer, specials: bool) -> Prompt:
    if not entry:
        raise ApiError(400, "prompt is empty; fix: send at least one token of text", param="prompt")
    if isinstance(entry, str):
        tokens = await _maybe_in_thread(
            len(entry), lambda: tokenizer.encode(entry, add_special_tokens=specials)
        )
        return Prompt(tuple(tokens), entry)
    return Prompt(tuple(entry), tokenizer.decode(entry, skip_special_tokens=False))


async def _maybe_in_thread(num_chars: int, work: Any) -> list[int]:
    """Short texts are tokenised at once; long ones where the event loop does not wait for them."""
    if num_chars < _LONG_TEXT:
        return list(work())
    return list(await asyncio.to_thread(work))


def _plain(message: Message) -> dict[str, Any]:
    """The message with its text parts joined by newlines, as templates expect it."""
    extra = message.model_extra or {}
    if extra.get("tool_calls"):
        raise ApiError(400, "tool_calls in messages is not supported", param="messages")
    content = message.content
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    return {**extra, "role": message.role, "content": text}
