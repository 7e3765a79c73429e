"""Validation of input files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ridgeline.serve.batch import validate
from ridgeline.serve.batch.validate import MAX_ERRORS, validate_file
from tests.serve.batch.helpers import CHAT, jsonl, request


def codes(data: bytes) -> list[tuple[str, int | None]]:
    return [(error.code, error.line) for error in validate_file([data], CHAT).errors]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_lines_are_split_however_the_file_is_cut(size: int) -> None:
    data = b"\n" + jsonl(request("a"), request("ü")) + b"  \n" + jsonl(request("c"))[:-1]
    found = validate_file([data[i : i + size] for i in range(0, len(data), size)], CHAT)
    assert [line.custom_id for line in found.lines] == ["a", "ü", "c"]
    for line in found.lines:
        text = data[line.first_byte : line.first_byte + line.num_bytes]
        assert json.loads(text)["custom_id"] == line.custom_id
    assert found.model == "fake" and not found.errors


def test_byte_order_mark_is_no_part_of_the_first_line() -> None:
    data = b"\xef\xbb\xbf" + jsonl(request("a"), request("b"))
    found = validate_file([data], CHAT)
    assert not found.errors and [line.custom_id for line in found.lines] == ["a", "b"]
    first = found.lines[0]
    text = data[first.first_byte : first.first_byte + first.num_bytes]
    assert json.loads(text)["custom_id"] == "a"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"[1]", "invalid_json_line"),
        (b'{"custom_id": "\xff"}', "invalid_json_line"),
        (b"[" * 100_000, "invalid_json_line"),
        (json.dumps({**request("b"), "body": 3}).encode(), "invalid_json_line"),
        (json.dumps({"custom_id": "b"}).encode(), "invalid_json_line"),
        (jsonl(request("a"))[:-1], "duplicate_custom_id"),
        (jsonl(request(""))[:-1], "invalid_custom_id"),
        (jsonl(request("x" * 513))[:-1], "invalid_custom_id"),
        (jsonl(request("b", method="GET"))[:-1], "invalid_method"),
        (jsonl(request("b", url="/v1/embeddings"))[:-1], "mismatched_endpoint"),
    ],
)
def test_errors_name_their_line(line: bytes, code: str) -> None:
    found = validate_file([jsonl(request("a")) + line], CHAT)
    assert [(error.code, error.line) for error in found.errors] == [(code, 2)]
    assert not found.lines, "no request of a bad file is run"


def test_empty_file_is_rejected() -> None:
    assert codes(b"") == codes(b"\n \n") == [("empty_file", None)]


def test_too_many_and_too_long_lines_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "MAX_REQUESTS", 3)
    assert codes(jsonl(*(request(str(i)) for i in range(5)))) == [("too_many_tasks", 4)]
    monkeypatch.setattr(validate, "MAX_LINE_BYTES", 300)
    assert codes(jsonl(request("a"), request("b" * 300))) == [("line_too_long", 2)]
    endless: Any = (b"x" * 100 for _ in range(10**9))
    assert validate_file(endless, CHAT).errors[0].code == "line_too_long"


def test_number_of_errors_is_limited() -> None:
    assert len(codes(b"{\n" * 1000)) == MAX_ERRORS
