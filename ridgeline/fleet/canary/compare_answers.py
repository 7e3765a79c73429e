"""Compare two answers to the same request: token by token, or by their text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ridgeline.fleet.relay import StreamRelay
from ridgeline.serve.generation.resume import ResumePoint

_CHARS_PER_TOKEN = 4

Units = tuple[tuple[int, ...], ...]
"""Per choice: token ids, or the characters of its text."""


class ComparedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a comparison needs. `tokens_per_unit`: 1 for token ids, less for characters."""

    choices: Units
    tokens_per_unit: float = 1.0


def streamed_answer(relay: StreamRelay) -> ComparedAnswer | None:
    """The tokens of a complete stream of Ridgeline; None for another server's."""
    point = relay.resume_point()
    if point is None or not relay.has_ended:
        return None
    return ComparedAnswer(choices=point.tokens)


def json_answer(body: bytes) -> ComparedAnswer | None:
    """The texts of a JSON answer; None if it has none."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
    texts = [text for text in map(_text, _parts(fields)) if text is not None]
    if not texts:
        return None
    return ComparedAnswer(
        choices=tuple(tuple(map(ord, text)) for text in texts), tokens_per_unit=1 / _CHARS_PER_TOKEN
    )


def count_differences(stable: ComparedAnswer, canary: ComparedAnswer) -> tuple[int, int]:
    """Tokens compared, and how many choices differ. A choice counts up to its first difference."""
    num_units = num_differing = 0
    length = max(len(stable.choices), len(canary.choices))
    for a, b in zip(_padded(stable, length), _padded(canary, length), strict=True):
        equal = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if equal is None and len(a) != len(b):
            equal = min(len(a), len(b))
        num_units += max(len(a), 1) if equal is None else equal + 1
        num_differing += equal is not None
    return max(num_differing, round(num_units * stable.tokens_per_unit)), num_differing


def comparison_body(body: bytes, relay: StreamRelay) -> bytes | None:
    """The request for the canary that has to give the same answer; None if none has to.

    A stream of Ridgeline is asked for with the seed that the stable server drew. Elsewhere only
    greedy requests and those with a seed have one answer.
    """
    fields = msgspec.json.decode(body, type=dict[str, Any])
    if relay.identity is not None:
        point = ResumePoint(**msgspec.structs.asdict(relay.identity))
        return msgspec.json.encode({**fields, "ridgeline_resume": point})
    if fields.get("seed") is None and fields.get("temperature") != 0:
        return None
    return body


def _padded(answer: ComparedAnswer, length: int) -> Sequence[tuple[int, ...]]:
    return (*answer.choices, *((),) * (length - len(answer.choices)))


def _parts(fields: dict[str, Any]) -> list[Any]:
    """The parts with text: choices of OpenAI, content blocks of Anthropic, items of Responses."""
    for name in ("choices", "content"):
        if isinstance(parts := fields.get(name), list):
            return parts
    output = fields.get("output")
    items = output if isinstance(output, list) else []
    return [
        part
        for item in items
        if isinstance(item, dict) and isinstance(item.get("content"), list)
        for part in item["content"]
    ]


def _text(part: Any) -> str | None:
    if not isinstance(part, dict):
        return None
    message = part.get("message")
    text = message.get("content") if isinstance(message, dict) else part.get("text")
    return text if isinstance(text, str) else None
