"""What a scripted answer sends, when, and what that means.

An answer is a list of *parts*, each with an instant (seconds after the request had arrived in
full) and the number of output tokens that it carries. Parts say what they are, not how they are
written, so that one script serves the chat endpoint and the completions endpoint alike.

`Truth` is written by hand for every case, from the definitions in docs/concepts/measurements.md and not from the
code that is to be tested with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

Ending = Literal["whole", "cut", "hang"]
Kind = Literal["role", "text", "reasoning", "tool", "finish", "usage", "done", "raw"]
Outcome = Literal["ok", "failed", "timeout"]

CREATED = 1_700_000_000


class ScriptedPart(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream. `pieces` > 1 splits its bytes over as many writes."""

    at_s: float
    kind: Kind
    text: str = ""
    tokens: int = 0
    finish: str | None = None
    running_usage: int | None = None
    told: bool = False  # the chunk says how many tokens it holds (token ids)
    field: str = "reasoning_content"
    raw: bytes = b""
    pieces: int = 1


class Truth(msgspec.Struct, frozen=True, kw_only=True):
    """What a client ought to measure; None: undefined. `meets`: the verdict on ttft:150 tpot:25."""

    outcome: Outcome
    ttft_s: float | None
    tpot_s: float | None
    itl_s: tuple[float, ...]
    e2e_s: float | None
    output_tokens: int
    meets: bool


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. `status` other than 200 refuses, with `body`. `prompt_tokens` is the usage's."""

    name: str
    about: str
    parts: tuple[ScriptedPart, ...]
    truth: Truth
    ending: Ending = "whole"
    status: int = 200
    body: bytes = b""
    prompt_tokens: int = 12
    chat_only: bool = False


Encode = Callable[[ScriptedPart], bytes]


def encoder(path: str, model: str, prompt_tokens: int) -> Encode:
    """How parts are written at this endpoint: `path` decides between chat and completions."""
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
            usage = _usage(prompt_tokens, part.tokens)
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
    if part.told:
        choice["token_ids"] = list(range(100, 100 + part.tokens))
    return choice


def _delta(part: ScriptedPart) -> dict[str, object]:
    match part.kind:
        case "role":
            return {"role": "assistant", "content": ""}
        case "reasoning":
            return {part.field: part.text}
        case "tool":
            return {"tool_calls": [{"index": 0, "function": {"arguments": part.text}}]}
        case "finish" if not part.text and not part.tokens:
            return {}
    return {"content": part.text}


def tokens(instants: Sequence[float], text: str = "ab ", each: int = 1) -> tuple[ScriptedPart, ...]:
    """One text chunk of `each` tokens per instant."""
    return tuple(
        ScriptedPart(at_s=at, kind="text", text=text * each, tokens=each) for at in instants
    )


def tail(at_s: float, num_tokens: int, usage_at_s: float | None = None) -> tuple[ScriptedPart, ...]:
    """A finish chunk, the usage chunk and [DONE]."""
    later = at_s if usage_at_s is None else usage_at_s
    return (
        ScriptedPart(at_s=at_s, kind="finish", finish="length"),
        ScriptedPart(at_s=later, kind="usage", tokens=num_tokens),
        ScriptedPart(at_s=later, kind="done"),
    )
