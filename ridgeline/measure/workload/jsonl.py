"""A workload from a JSONL file: one request per line, in one of three forms.

    {"prompt": "text" | [1, 2, 3], "output_tokens": 128}                     vLLM's custom dataset
    {"messages": [{"role": "user", "content": "…"}], "output_tokens": 128}   a conversation
    {"custom_id": "a", "url": "/v1/chat/completions", "body": {…}}           OpenAI batch

`kind` and `tenant` are optional. The output length is required. A sample goes
through the lines in an order shuffled by the seed; if it needs more requests than there are lines,
it starts over with a new shuffle, and repeated prompts may hit a prefix cache.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.errors import DECODE_ERRORS, BadInput
from ridgeline.measure.workload.base import ChatPrompt, LoadRequest, Prompt, PromptMessage

_FORM = '{"prompt": "text", "output_tokens": 128}'
_ROLES = ("system", "developer", "user", "assistant", "tool")


class FileWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """The parsed lines of a file; `name` is its path."""

    name: str
    lines: tuple[LoadRequest, ...]

    def sample(self, n: int, seed: int) -> Iterator[LoadRequest]:
        rng = random.Random(f"{seed}/jsonl")
        order: list[LoadRequest] = []
        for index in range(n):
            if not order:
                order = list(self.lines)
                rng.shuffle(order)
            line = order.pop()
            yield msgspec.structs.replace(line, id=f"{line.id}-{seed}-{index}")


def read_workload(path: Path) -> FileWorkload:
    """Read and validate every line. Raises BadInput for the first invalid one."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("cannot read the workload file", value=str(path), fix=str(error)) from None
    # Split at \n only: str.splitlines would split a JSON string at U+2028.
    numbered = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not numbered:
        raise BadInput(
            "the workload file has no lines", value=str(path), fix=f"write lines like {_FORM}"
        )
    return FileWorkload(
        name=str(path), lines=tuple(_request(f"{path}:{i}", i, line) for i, line in numbered)
    )


def _request(where: str, number: int, line: str) -> LoadRequest:
    try:
        row = msgspec.json.decode(line)
    except DECODE_ERRORS as error:
        raise BadInput(f"{where}: not JSON ({error})", fix=f"write {_FORM}") from None
    if not isinstance(row, dict):
        raise BadInput(f"{where}: not an object", value=line[:60], fix=f"write {_FORM}")
    body = row.get("body", row)
    if not isinstance(body, dict):
        raise BadInput(f"{where}: body is not an object", fix="copy a line of an OpenAI batch file")
    return LoadRequest(
        id=str(row.get("custom_id", f"line-{number}")),
        kind=_text(where, row, "kind", "chat" if "messages" in body else "text"),
        prompt=_prompt(where, body),
        max_tokens=_output_tokens(where, body),
        tenant=_text(where, row, "tenant", ""),
    )


def _text(where: str, row: dict[str, Any], field: str, default: str) -> str:
    value = row.get(field, default)
    if not isinstance(value, str):
        raise BadInput(f"{where}: {field} is not text", value=value)
    return value


def _prompt(where: str, body: dict[str, Any]) -> Prompt:
    if "messages" in body:
        return _chat(where, body["messages"])
    match body.get("prompt"):
        case str(text) if text:
            return text
        case list(ids) if ids and all(type(i) is int and i >= 0 for i in ids):
            return tuple(ids)
    raise BadInput(
        f"{where}: prompt must be text or token ids", value=body.get("prompt"), fix=f"write {_FORM}"
    )


def _chat(where: str, messages: object) -> ChatPrompt:
    try:
        parsed = msgspec.convert(messages, tuple[PromptMessage, ...])
    except msgspec.ValidationError as error:
        raise BadInput(
            f"{where}: messages: {error}", fix='{"role": "user", "content": "…"}'
        ) from None
    if not parsed:
        raise BadInput(f"{where}: messages is empty", fix="add at least one message")
    for message in parsed:
        if message.role not in _ROLES:
            raise BadInput(f"{where}: unknown role", value=message.role, limit=", ".join(_ROLES))
    return ChatPrompt(parsed)


def _output_tokens(where: str, body: dict[str, Any]) -> int:
    for field in ("output_tokens", "max_completion_tokens", "max_tokens"):
        value = body.get(field)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise BadInput(f"{where}: {field} must be a positive whole number", value=value)
        return value
    raise BadInput(f"{where}: the output length is missing", fix='add "output_tokens": 128')
