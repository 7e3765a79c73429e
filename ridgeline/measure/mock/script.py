"""Scripted answers and the metrics that a client should measure on them.

An answer is a list of *parts*, each with a time (seconds after the complete request has arrived)
and its number of output tokens. Parts are independent of the endpoint, so that one script serves
both chat and completions.

`ExpectedMetrics` are worked out by hand for every case from the definitions in
docs/concepts/measurements.md, not from the code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

Ending = Literal["whole", "cut", "hang"]
Kind = Literal["role", "text", "reasoning", "tool", "finish", "usage", "done", "raw"]
MockOutcome = Literal["ok", "failed", "timeout"]

CREATED = 1_700_000_000


class ScriptedPart(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream. `pieces` > 1 splits its bytes over as many writes."""

    at_s: float
    kind: Kind
    text: str = ""
    num_tokens: int = 0
    finish: str | None = None
    running_usage: int | None = None
    has_token_ids: bool = False  # the chunk contains the ids of its tokens
    field: str = "reasoning_content"
    raw: bytes = b""
    pieces: int = 1


class ExpectedMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What a client should measure; None: undefined. `meets`: under ttft:150 tpot:25."""

    outcome: MockOutcome
    ttft_s: float | None
    tpot_s: float | None
    itl_s: tuple[float, ...]
    e2e_s: float | None
    output_tokens: int
    meets: bool


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """One answer.

    A `status` other than 200 is an error with `body`. `prompt_tokens`: of the usage.
    """

    name: str
    about: str
    parts: tuple[ScriptedPart, ...]
    truth: ExpectedMetrics
    ending: Ending = "whole"
    status: int = 200
    body: bytes = b""
    prompt_tokens: int = 12
    chat_only: bool = False


Encode = Callable[[ScriptedPart], bytes]


def encoder(path: str, model: str, prompt_tokens: int) -> Encode:
    """The encoder of parts for an endpoint, chat or completions by `path`."""
    chat = path.endswith("/chat/completions")
    head = {
        "id": "mock",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": CREATED,
        "model": model,
    }

    def encode(part: ScriptedPart) -> bytes:
        if part.kind == "raw":
            return part.raw
        if part.kind == "done":
            return b"data: [DONE]\n\n"
        if part.kind == "usage":
            usage = _usage(prompt_tokens, part.num_tokens)
            return _event({**head, "choices": [], "usage": usage})
        if part.kind == "role" and not chat:
            return b""
        body: dict[str, object] = {**head, "choices": [_choice(part, chat)]}
        if part.running_usage is not None:
            body["usage"] = _usage(prompt_tokens, part.running_usage)
        return _event(body)

    return encode


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _event(body: dict[str, object]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _choice(part: ScriptedPart, chat: bool) -> dict[str, object]:
    choice: dict[str, object] = {"index": 0, "finish_reason": part.finish}
    if chat:
        choice["delta"] = _delta(part)
    else:
        choice["text"] = part.text
    if part.has_token_ids:
        choice["token_ids"] = list(range(100, 100 + part.num_tokens))
    return choice


def _delta(part: ScriptedPart) -> dict[str, object]:
    match part.kind:
        case "role":
            return {"role": "assistant", "content": ""}
        case "reasoning":
            return {part.field: part.text}
        case "tool":
            return {"tool_calls": [{"index": 0, "function": {"arguments": part.text}}]}
        case "finish" if not part.text and not part.num_tokens:
            return {}
    return {"content": part.text}


def token_chunks(
    times_s: Sequence[float], text: str = "ab ", each: int = 1
) -> tuple[ScriptedPart, ...]:
    """A text chunk of `each` tokens at every time."""
    return tuple(
        ScriptedPart(at_s=at, kind="text", text=text * each, num_tokens=each) for at in times_s
    )


def final_chunks(
    at_s: float, num_tokens: int, usage_at_s: float | None = None
) -> tuple[ScriptedPart, ...]:
    """A finish chunk, the usage chunk and [DONE]."""
    later = at_s if usage_at_s is None else usage_at_s
    return (
        ScriptedPart(at_s=at_s, kind="finish", finish="length"),
        ScriptedPart(at_s=later, kind="usage", num_tokens=num_tokens),
        ScriptedPart(at_s=later, kind="done"),
    )
