"""Requests of every kind, and their answers in a form that does not depend on who gave them."""

from __future__ import annotations

import re
from typing import Any

MESSAGES = [{"role": "user", "content": "import os"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "numbers": {"type": "array", "items": {"type": "integer"}, "maxItems": 12},
    },
    "required": ["name", "numbers"],
    "additionalProperties": False,
}
LENGTH = 120
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (
        "completions",
        {"prompt": "def f(", "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True},
    ),
    "sampled": (
        "completions",
        {
            "prompt": "class A:",
            "max_tokens": LENGTH,
            "temperature": 1.2,
            "seed": 3,
            "ignore_eos": True,
        },
    ),
    "penalised": (
        "completions",
        {
            "prompt": "for i in",
            "max_tokens": LENGTH,
            "frequency_penalty": 0.9,
            "presence_penalty": 0.3,
            "repetition_penalty": 1.2,
            "temperature": 0.8,
            "seed": 8,
            "ignore_eos": True,
            "logprobs": 1,
        },
    ),
    "structured": (
        "chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": LENGTH,
            "seed": 1,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            },
        },
    ),
    "choices": (
        "chat/completions",
        {
            "messages": MESSAGES,
            "n": 3,
            "seed": 5,
            "max_tokens": LENGTH // 2,
            "ignore_eos": True,
        },
    ),
    "responses": (
        "responses",
        {"input": "import os", "max_output_tokens": LENGTH, "temperature": 0},
    ),
    "messages": (
        "messages",
        {"model": "demo", "messages": MESSAGES, "max_tokens": LENGTH, "temperature": 0},
    ),
}

_VARYING = (
    (re.compile(rb'"(id|item_id|call_id)":"[^"]*"'), rb'"\1":""'),
    (re.compile(rb'"(created|created_at)":\d+'), rb'"\1":0'),
    (re.compile(rb'"cached_tokens":\d+'), rb'"cached_tokens":0'),
    (re.compile(rb'"(cache_read_input_tokens|input_tokens)":\d+'), rb'"\1":0'),
)
_CHOICE = re.compile(rb'"choices":\[\{"index":(\d+)')


def canonical(data: bytes) -> bytes:
    """An answer without ids and times; events by choice, whose order depends on the batch."""
    for pattern, replacement in _VARYING:
        data = pattern.sub(replacement, data)
    events: list[bytes] = data.split(b"\n\n")
    events.sort(key=_choice_of)
    return b"\n\n".join(events)


def _choice_of(event: bytes) -> int:
    found = _CHOICE.search(event)
    return int(found[1]) if found else 99
