"""Validate an input file: one request per line, for the batch's endpoint, with a unique name.

Whatever is wrong with a line by itself is reported here, before anything runs. What only the
endpoint can reject (a field out of range, a prompt that is too long) becomes that request's error.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

import msgspec

from ridgeline.serve.batch.records import MAX_REQUESTS, InputFileError, InputLine

MAX_CUSTOM_ID_CHARS = 512
MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_ERRORS = 100
"""Errors that are kept of one file."""


class ValidatedFile(msgspec.Struct, frozen=True):
    """The requests of a file, or why it is rejected.

    `model`: the first that is named; `models`: all that are, and None if a request names none.
    """

    lines: list[InputLine]
    errors: list[InputFileError]
    model: str | None
    models: frozenset[str | None] = frozenset()


class _InputBody(msgspec.Struct):
    model: str | None = None


class _InputRequest(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _InvalidLine(Exception):
    def __init__(self, code: str, message: str, line: int, param: str | None = None) -> None:
        self.error = InputFileError(code=code, message=message, param=param, line=line)
        super().__init__(message)


def validate_file(pieces: Iterable[bytes], endpoint: str) -> ValidatedFile:
    """Validate a file that is read in pieces of any length."""
    lines: list[InputLine] = []
    errors: list[InputFileError] = []
    custom_ids: set[str] = set()
    models: dict[str | None, None] = {}  # ordered
    for number, (first_byte, text) in enumerate(_split_lines(pieces), 1):
        if number == 1 and text.startswith(codecs.BOM_UTF8):  # editors on Windows write it
            text, first_byte = text[3:], first_byte + 3
        if not text.strip():
            continue
        if len(lines) >= MAX_REQUESTS:
            message = f"the file has more than {MAX_REQUESTS} requests; fix: split it"
            errors.append(InputFileError(code="too_many_tasks", message=message, line=number))
            break
        try:
            request, body = _parse_line(text, endpoint, custom_ids, number)
        except _InvalidLine as invalid:
            errors.append(invalid.error)
            if len(errors) >= MAX_ERRORS:
                break
            continue
        custom_ids.add(request.custom_id)
        models.setdefault(body.model)
        lines.append(
            InputLine(custom_id=request.custom_id, first_byte=first_byte, num_bytes=len(text))
        )
    if not lines and not errors:
        errors.append(InputFileError(code="empty_file", message="the file has no requests"))
    first_model = next(filter(None, models), None)
    return ValidatedFile([] if errors else lines, errors, first_model, frozenset(models))


def _parse_line(
    text: bytes, endpoint: str, custom_ids: set[str], number: int
) -> tuple[_InputRequest, _InputBody]:
    if len(text) > MAX_LINE_BYTES:
        message = f"the line is too long; limit: {MAX_LINE_BYTES} bytes"
        raise _InvalidLine("line_too_long", message, number)
    try:
        request = msgspec.json.decode(text, type=_InputRequest)
        body = msgspec.json.decode(request.body, type=_InputBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _InvalidLine("invalid_json_line", f"not a batch request: {error}", number) from None
    if not request.custom_id or len(request.custom_id) > MAX_CUSTOM_ID_CHARS:
        message = f"custom_id must have 1 to {MAX_CUSTOM_ID_CHARS} characters"
        raise _InvalidLine("invalid_custom_id", message, number, "custom_id")
    if request.custom_id in custom_ids:
        message = f"custom_id {request.custom_id[:80]!r} is used by an earlier line"
        raise _InvalidLine("duplicate_custom_id", message, number, "custom_id")
    if request.method != "POST":
        raise _InvalidLine("invalid_method", "method must be POST", number, "method")
    if request.url != endpoint:
        message = f"url is not the batch's endpoint {endpoint}"
        raise _InvalidLine("mismatched_endpoint", message, number, "url")
    return request, body


def _split_lines(pieces: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """(first byte, text without its newline) of every line."""
    rest, position = b"", 0
    for piece in pieces:
        *complete, rest = (rest + piece).split(b"\n")
        for text in complete:
            yield position, text
            position += len(text) + 1
        if len(rest) > MAX_LINE_BYTES:
            break
    if rest:
        yield position, rest
