"""Which of pydantic's complaints about a body to report, and where in the body it is.

For a union, pydantic lists what is wrong with the value as each of its branches: a text, a list of
texts, a message, a call. The branch that the client meant is the one whose `type` matches, or that
was followed furthest into the value.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

MAX_STEPS = 16
_QUOTED = re.compile(r"'([^']+)'")
_NOT_TEXT = re.compile(r"image|audio|video|file|document")


class BodyError(msgspec.Struct, frozen=True):
    """A complaint: the path to the value in the body, and the reason."""

    path: tuple[int | str, ...]
    message: str
    value: Any
    is_missing: bool = False


class _Complaint(msgspec.Struct, frozen=True):
    error: Any
    path: tuple[int | str, ...]
    branches: tuple[tuple[tuple[int | str, ...], int], ...]
    """Each branch of a union on the way: its location, and the length of the path to its value."""


def explain(errors: Sequence[Any], body: Any) -> BodyError:
    """The complaint to report; `errors` as `ValidationError.errors()` lists them."""
    located = [_locate(error, body) for error in errors]
    complaints = [
        problem for problem in located if problem.path[:1] == located[0].path[:1]
    ]  # one field
    mismatched = {
        branch
        for complaint in complaints
        for branch, depth in complaint.branches
        if _is_tag(complaint) and len(complaint.path) == depth + 1
    }
    chosen = max(complaints, key=lambda complaint: _rank(complaint, mismatched))
    return BodyError(
        chosen.path, _message(chosen, complaints), chosen.error["input"], _is_missing(chosen)
    )


def _locate(error: Any, body: Any) -> _Complaint:
    location, path, at = tuple(error["loc"]), list[int | str](), body
    branches: list[tuple[tuple[int | str, ...], int]] = []
    for place, step in enumerate(location):
        is_index = isinstance(at, list) and isinstance(step, int) and 0 <= step < len(at)
        if is_index or (isinstance(at, dict) and step in at):
            at = at[step]
            path.append(step)
        elif place == len(location) - 1 and error["type"] == "missing":
            path.append(step)
        else:
            branches.append((location[: place + 1], len(path)))
    return _Complaint(error, tuple(path), tuple(branches))


def _is_missing(complaint: _Complaint) -> bool:
    return bool(complaint.error["type"] == "missing")


def _is_tag(complaint: _Complaint) -> bool:
    is_literal = complaint.error["type"] == "literal_error"
    return bool(is_literal and complaint.path and complaint.path[-1] == "type")


def _rank(complaint: _Complaint, mismatched: set[tuple[int | str, ...]]) -> tuple[Any, ...]:
    """Larger for the complaint about what the client meant."""
    kind = complaint.error["type"]
    is_other_kind = kind.endswith(("_type", "_parsing")) or (
        kind == "literal_error" and isinstance(complaint.error["input"], dict | list)
    )
    fits = [1 if branch in mismatched else 2 for branch, _ in complaint.branches]
    if is_other_kind and complaint.branches and len(complaint.path) == complaint.branches[-1][1]:
        fits[-1] = 0  # the value is not even of the branch's kind
    return (
        tuple(fits),
        len(complaint.path),
        tuple(step for step in complaint.path if isinstance(step, int)),
        kind == "literal_error",
        not is_other_kind,
        not _is_missing(complaint),
    )


def _message(chosen: _Complaint, complaints: Sequence[_Complaint]) -> str:
    message = str(chosen.error["msg"])
    value = chosen.error["input"]
    if not _is_tag(chosen):
        return message
    if isinstance(value, str) and _NOT_TEXT.search(value):
        return "only text is supported; fix: send parts of type text"
    if value == "item_reference":
        return "this server stores no items; fix: send the item itself"
    same = [c for c in complaints if c.path == chosen.path and c.error["type"] == "literal_error"]
    expected = dict.fromkeys(name for c in same for name in _QUOTED.findall(str(c.error["msg"])))
    return "Input should be " + " or ".join(f"'{name}'" for name in expected)
