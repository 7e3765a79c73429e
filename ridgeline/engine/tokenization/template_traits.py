"""Finds out what a chat template expects of its messages, by rendering small conversations.

Templates disagree on the form of a message: some loop over content parts and drop plain text, some
write a list of parts as Python source, some write a missing content as "None", some need the
arguments of a tool call as text. A template's source does not tell these
apart reliably; its output does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, Literal, Protocol

import msgspec

Message = dict[str, Any]


class Render(Protocol):
    """Renders a conversation; None if the template rejects it."""

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None
    ) -> str | None: ...


MissingContent = Literal["absent", "null", "empty"]

_MISSING: tuple[MissingContent, ...] = ("absent", "null", "empty")
_MARK, _VALUE = "RidgelineProbe", "RidgelineValue"
_REJECTED = 0
_TOOL: Message = {
    "type": "function",
    "function": {
        "name": "tool",
        "description": "a tool",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}


class TemplateTraits(msgspec.Struct, frozen=True):
    """The forms in which a template takes content: a string, or a list of `{"type": "text", …}`."""

    takes_text: bool
    takes_parts: bool


class CallTraits(msgspec.Struct, frozen=True):
    """The forms in which a template takes an assistant's message that calls tools.

    `text_arguments`: the arguments as JSON text instead of an object. `missing_content`: how a
    message without content is passed.
    """

    text_arguments: bool
    missing_content: MissingContent


def find_traits(render: Render) -> TemplateTraits:
    """The traits of the template that `render` renders."""
    takes_text = _MARK in (render([_message("user", _MARK)]) or "")
    as_parts = render([_message("user", [text_part(_MARK)])]) or ""
    takes_parts = _MARK in as_parts and not any(key in as_parts for key in ("'type'", '"type"'))
    return TemplateTraits(takes_text=takes_text or not takes_parts, takes_parts=takes_parts)


def find_call_traits(render: Render, traits: TemplateTraits) -> CallTraits:
    """The first forms of a tool call with which its name and arguments are rendered as JSON.

    Where the template renders no calls, the first forms of the message that it does not reject.
    """
    question: Any = "x" if traits.takes_text else [text_part("x")]
    best, best_score = CallTraits(text_arguments=False, missing_content="absent"), _REJECTED
    for text_arguments, missing in product((False, True), _MISSING):
        arguments: object = f'{{"key": "{_VALUE}"}}' if text_arguments else {"key": _VALUE}
        call = _call({"name": _MARK, "arguments": arguments})
        message: Message = {"role": "assistant", "tool_calls": [call]}
        if missing != "absent":
            message["content"] = None if missing == "null" else ""
        reply = {"role": "tool", "tool_call_id": "abcdefghi", "name": _MARK, "content": question}
        conversation = [_message("user", question), message, reply]
        out = render(conversation, [_TOOL]) or render(conversation[:-1], [_TOOL])
        score = _REJECTED if out is None else _score(out)
        if score > best_score:
            best, best_score = CallTraits(text_arguments, missing), score
    return best


def text_part(text: str) -> Message:
    """A content part that holds text."""
    return {"type": "text", "text": text}


def _message(role: str, content: object) -> Message:
    return {"role": role, "content": content}


def _call(function: Mapping[str, object]) -> Message:
    return {"id": "abcdefghi", "type": "function", "function": dict(function)}


def _score(out: str) -> int:
    """1 or 2 if the call is lost, 3 if it is rendered as Python source, or next to a "None", else
    4; a lost call is 1 next to a "None"."""
    if _MARK not in out or _VALUE not in out:
        return 1 if "None" in out else 2
    return 3 if repr(_VALUE) in out or f'\\"{_VALUE}' in out or "None" in out else 4
