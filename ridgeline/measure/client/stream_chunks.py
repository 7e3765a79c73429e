"""Which streamed chunks of OpenAI-compatible servers carry tokens, and how many.

Servers differ, and most published errors in TTFT and ITL come from these differences. The rules:

- Text (content, reasoning, reasoning_content, a completion's text, tool-call arguments) is output.
- `delta: {role, content: ""}` is metadata: it does not stop the TTFT clock.
- An empty text without a role is a token that decodes to nothing (half a UTF-8 character).
- An empty text with a finish_reason may be either: it counts only if the server's final count says
  that exactly that many tokens are missing (more are missing if chunks hold several).
- A chunk without choices carries usage only and never moves the end of the output.
- The number of tokens of a chunk is that of its token_ids or logprobs; else the growth of a running
  usage count; else one, and the rest of the server's final count is distributed over the chunks by
  the length of their text (largest remainder), so that the total is exact.
- Fields of another type than OpenAI's (a list of content parts, arguments as an object, numbers as
  text, null or with a fraction) are read for what a measurement needs, and left out otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ridgeline.errors import DECODE_ERRORS

_MAX_MS = 1e12  # of a measurement; a JSON integer may be larger than any float


class Logprobs(msgspec.Struct, frozen=True):
    """`content` in chat chunks, `tokens` in completion chunks: one entry per token."""

    content: list[Any] | None = None
    tokens: list[Any] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.content or self.tokens or ())


class ChunkToolFunction(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class ChunkToolCall(msgspec.Struct, frozen=True):
    function: ChunkToolFunction | None = None


class Delta(msgspec.Struct, frozen=True):
    """`thinking` and `reasoning_details` (text, or parts with text) are reasoning, too."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    thinking: Any = None
    reasoning_details: Any = None
    tool_calls: list[ChunkToolCall] | None = None

    @property
    def text(self) -> str:
        calls = (call.function for call in self.tool_calls or ())
        called = [part for f in calls if f is not None for part in (f.name, f.arguments)]
        parts = [self.reasoned, self.content, *called]
        return "".join(part for part in parts if part)

    @property
    def reasoned(self) -> str:
        plain = self.reasoning or self.reasoning_content
        return plain or _text_in(self.thinking) or _text_in(self.reasoning_details)

    @property
    def is_reasoning(self) -> bool:
        """Whether it carries reasoning and nothing that a user sees as the answer."""
        return bool(self.reasoned) and not (self.content or self.tool_calls)

    @property
    def is_empty_token(self) -> bool:
        """True for an empty text that is not marked as metadata."""
        texts = (self.content, self.reasoning, self.reasoning_content)
        return self.role is None and any(text is not None for text in texts)


class ChunkChoice(msgspec.Struct, frozen=True):
    """One choice of a chunk. `message` replaces `delta` in a chat answer that was not streamed."""

    index: int = 0
    delta: Delta | None = None
    message: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    token_ids: list[int] | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class ChunkUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0


class Chunk(msgspec.Struct, frozen=True):
    """One data line. `error` is what servers send instead of choices if they fail.

    `metrics` (vLLM, Ridgeline: --enable-per-request-metrics) and `timings` (llama.cpp) are optional
    per-request measurements of the server.
    """

    choices: list[ChunkChoice] | None = None
    usage: ChunkUsage | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None
    metrics: Any = None
    timings: Any = None

    @property
    def prefill_s(self) -> float | None:
        """From the request's first step to its first token, as the server reports it."""
        for report, name in (
            (self.metrics, "time_to_first_token_ms"),
            (self.timings, "prompt_ms"),
        ):
            value = report.get(name) if isinstance(report, dict) else None
            if isinstance(value, int | float) and 0 <= value < _MAX_MS:
                return value / 1000
        return None


_DECODER = msgspec.json.Decoder(Chunk)


def decode_chunk(data: bytes) -> Chunk:
    """Parse one data line. Raises msgspec.DecodeError if it is not a chunk."""
    try:
        return _DECODER.decode(data)
    except msgspec.ValidationError:
        body = msgspec.json.decode(data)
        if not isinstance(body, dict) or not isinstance(body.get("choices", []), list | None):
            raise
        return msgspec.convert(_as_openai(body), Chunk)


def _as_openai(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a measurement reads of a chunk, in OpenAI's types."""
    choices, usage = body.get("choices"), body.get("usage")
    found: dict[str, Any] = {
        key: body[key] for key in ("error", "metrics", "timings") if key in body
    }
    found |= {key: body[key] for key in ("object", "message") if isinstance(body.get(key), str)}
    if isinstance(choices, list):
        found["choices"] = [_choice(choice) for choice in choices if isinstance(choice, dict)]
    if isinstance(usage, dict):
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        found["usage"] = {
            "prompt_tokens": _whole(usage.get("prompt_tokens")) or 0,
            "completion_tokens": _whole(usage.get("completion_tokens")),
            "prompt_tokens_details": {"cached_tokens": _whole(cached)},
        }
    return found


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        key: _delta(choice[key])
        for key in ("delta", "message")
        if isinstance(choice.get(key), dict)
    }
    found["index"] = _whole(choice.get("index")) or 0
    for key in ("text", "finish_reason"):
        if isinstance(choice.get(key), str):
            found[key] = choice[key]
    logprobs, ids = choice.get("logprobs"), choice.get("token_ids")
    if isinstance(logprobs, dict):
        lists = ("content", "tokens")
        found["logprobs"] = {key: v for key in lists if isinstance(v := logprobs.get(key), list)}
    if isinstance(ids, list) and all(isinstance(i, int) for i in ids):
        found["token_ids"] = ids
    return found


def _delta(delta: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        key: value
        for key in ("role", "content", "reasoning", "reasoning_content")
        if isinstance(value := delta.get(key), str)
    }
    found |= {key: delta.get(key) for key in ("thinking", "reasoning_details")}
    if isinstance(parts := delta.get("content"), list):
        thoughts = [part for part in parts if isinstance(part, dict) and "thinking" in part]
        found["content"] = _text_in([part for part in parts if part not in thoughts])
        found["thinking"] = thoughts or found["thinking"]
    calls = delta.get("tool_calls")
    if isinstance(calls, list):
        found["tool_calls"] = [_call(call) for call in calls if isinstance(call, dict)]
    return found


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        return {}
    name, arguments = function.get("name"), function.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    return {"function": {"name": name if isinstance(name, str) else None, "arguments": arguments}}


def _text_in(value: Any) -> str:
    """The text of a string, of a part {text | thinking | content}, or of a list of these."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(map(_text_in, value))
    if not isinstance(value, dict):
        return ""
    return next(
        (_text_in(value[key]) for key in ("text", "thinking", "content") if key in value), ""
    )


def _whole(value: Any) -> int | None:
    """A number, or its text, as an integer; None if it is none."""
    try:
        return int(float(value)) if isinstance(value, int | float | str) else None
    except (*DECODE_ERRORS, OverflowError):
        return None


def error_message(chunk: Chunk) -> str | None:
    """The error that a chunk reports, in the server's words; None if it reports none."""
    if isinstance(chunk.error, dict) and isinstance(chunk.error.get("message"), str):
        message = str(chunk.error["message"])
        return message if message or not chunk.choices else None
    if chunk.error or (chunk.error is not None and not chunk.choices):
        return chunk.error if isinstance(chunk.error, str) else repr(chunk.error)
    return chunk.message or "the server reported an error" if chunk.object == "error" else None


def is_failure(finish_reason: str | None) -> bool:
    """Whether a finish_reason says that the server failed: "error", "internal_error"."""
    return finish_reason is not None and finish_reason.lower().rpartition("_")[2] == "error"


class OutputChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk with output. `count` None: unknown. `doubtful`: it may hold no token."""

    at_s: float
    text: str
    count: int | None = None
    doubtful: bool = False
    reasoning: bool = False


def output_of(choice: ChunkChoice, at_s: float) -> OutputChunk | None:
    """The output of a choice, or None if it is metadata."""
    known = len(choice.token_ids or ()) or (choice.logprobs.num_tokens if choice.logprobs else 0)
    text, empty_token = _text_of(choice)
    if not (text or known or empty_token):
        return None
    doubtful = not text and not known and choice.finish_reason is not None
    message = choice.delta or choice.message
    reasoning = message is not None and message.is_reasoning
    return OutputChunk(
        at_s=at_s, text=text, count=known or None, doubtful=doubtful, reasoning=reasoning
    )


def _text_of(choice: ChunkChoice) -> tuple[str, bool]:
    message = choice.delta or choice.message
    if message is not None:
        return message.text, message.is_empty_token
    return choice.text or "", choice.text is not None


def count_tokens(pieces: Sequence[OutputChunk], total: int | None) -> list[tuple[float, int]]:
    """(time, tokens) of each chunk with output; the sum is the server's `total` if it gave one."""
    certain = [piece for piece in pieces if not piece.doubtful]
    if total is None:
        return [(piece.at_s, piece.count or 1) for piece in certain]
    missing = total - sum(piece.count or 1 for piece in certain)
    some_unknown = any(piece.count is None for piece in certain)
    if missing == len(pieces) - len(certain) or (missing > 0 and not some_unknown):
        certain = list(pieces)  # the doubtful chunks hold the missing tokens
    counts = [piece.count or 1 for piece in certain]
    surplus = total - sum(counts)
    if surplus > 0:
        unknown = [i for i, piece in enumerate(certain) if piece.count is None]
        for i, extra in zip(
            unknown, _distribute(surplus, [certain[i] for i in unknown]), strict=True
        ):
            counts[i] += extra
    elif surplus < 0:
        _remove_excess(-surplus, certain, counts)
    return [(piece.at_s, count) for piece, count in zip(certain, counts, strict=True) if count]


def _distribute(surplus: int, pieces: Sequence[OutputChunk]) -> list[int]:
    """Integer shares of `surplus` in proportion to text length, by largest remainder."""
    if not pieces:
        return []
    weights = [len(piece.text.encode()) for piece in pieces]
    if not any(weights):
        weights = [1] * len(pieces)
    exact = [surplus * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: surplus - sum(shares)]:
        shares[i] += 1
    return shares


def _remove_excess(excess: int, pieces: Sequence[OutputChunk], counts: list[int]) -> None:
    """More chunks than tokens: the empty ones are keep-alives, the last ones trailing text."""
    empty_first = sorted(range(len(pieces)), key=lambda i: (bool(pieces[i].text), -i))
    for i in empty_first:
        taken = min(excess, counts[i])
        counts[i] -= taken
        excess -= taken
