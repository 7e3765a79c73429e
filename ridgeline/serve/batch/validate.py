"""Is an input file one request per line, each for the batch's endpoint, each with its own name?

Everything that can be wrong with a line by itself is told here, before anything is computed; what
only the endpoint can tell (a field out of range, a prompt too long) becomes that line's error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from ridgeline.serve.batch.records import MAX_LINES, Line, LineError

MAX_CUSTOM_ID = 512
MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_ERRORS = 100
"""Complaints that are kept; a file of one mistake in every line needs no 50,000 of them."""


class Checked(msgspec.Struct, frozen=True):
    """What a file holds: its lines, or why it is refused. `model`: the first that is named;
    `models`: all that are, and None where a line names none."""

    lines: list[Line]
    errors: list[LineError]
    model: str | None
    models: frozenset[str | None] = frozenset()


class _Body(msgspec.Struct):
    model: str | None = None


class _Request(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


def check(pieces: Iterable[bytes], endpoint: str) -> Checked:
    """Read a file as it comes, in pieces of any length."""
    lines: list[Line] = []
    errors: list[LineError] = []
    names: set[str] = set()
    models: dict[str | None, None] = {}  # in order
    for number, (first_byte, text) in enumerate(_split(pieces), 1):
        if not text.strip():
            continue
        if len(lines) >= MAX_LINES:
            message = f"the file has more than {MAX_LINES} requests; fix: split it"
            errors.append(LineError(code="too_many_tasks", message=message, line=number))
            break
        try:
            request, asked = _read(text, endpoint, names, number)
        except _Bad as bad:
            errors.append(bad.error)
            if len(errors) >= MAX_ERRORS:
                break
            continue
        names.add(request.custom_id)
        models.setdefault(asked.model)
        lines.append(Line(custom_id=request.custom_id, first_byte=first_byte, num_bytes=len(text)))
    if not lines and not errors:
        errors.append(LineError(code="empty_file", message="the file has no requests"))
    first = next(filter(None, models), None)
    return Checked([] if errors else lines, errors, first, frozenset(models))


class _Bad(Exception):
    def __init__(self, code: str, message: str, number: int, param: str | None = None) -> None:
        self.error = LineError(code=code, message=message, param=param, line=number)
        super().__init__(message)


def _read(text: bytes, endpoint: str, names: set[str], number: int) -> tuple[_Request, _Body]:
    if len(text) > MAX_LINE_BYTES:
        raise _Bad("line_too_long", f"a line has at most {MAX_LINE_BYTES} bytes", number)
    try:
        request = msgspec.json.decode(text, type=_Request)
        body = msgspec.json.decode(request.body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Bad("invalid_json_line", f"not a batch request: {error}", number) from None
    if not request.custom_id or len(request.custom_id) > MAX_CUSTOM_ID:
        message = f"custom_id must have 1 to {MAX_CUSTOM_ID} characters"
        raise _Bad("invalid_custom_id", message, number, "custom_id")
    if request.custom_id in names:
        message = f"custom_id {request.custom_id[:80]!r} is used by an earlier line"
        raise _Bad("duplicate_custom_id", message, number, "custom_id")
    if request.method != "POST":
        raise _Bad("invalid_method", "method must be POST", number, "method")
    if request.url != endpoint:
        message = f"url is not the batch's endpoint {endpoint}"
        raise _Bad("mismatched_endpoint", message, number, "url")
    return request, body


def _split(pieces: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """(first byte, text without its newline) of every line."""
    rest, at = b"", 0
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for text in whole:
            yield at, text
            at += len(text) + 1
        if len(rest) > MAX_LINE_BYTES:
            break
    if rest:
        yield at, rest
