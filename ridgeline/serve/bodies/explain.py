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
_SHOULD_BE = "Input should be "
_DICTIONARY = re.compile(
    r"a valid dictionary( or object to extract fields from| or instance of \w+)?"
)
_NOT_TEXT = re.compile(r"((in|out)put_)?(image|audio|video|file|document)(_url)?")


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
    located = [_locate(_without_tag_union(error), body) for error in errors]
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


def _without_tag_union(error: Any) -> Any:
    """A complaint about an item whose `type` selects its model, as one about that `type`."""
    kind = {"union_tag_invalid": "literal_error", "union_tag_not_found": "missing"}.get(
        error["type"]
    )
    if kind is None:
        return error
    given = error["input"].get("type") if isinstance(error["input"], dict) else None
    if kind == "missing" and given is None:
        at: dict[str, Any] = {"type": kind, "msg": "Field required", "input": error["input"]}
    else:
        expected = str(error["msg"]).partition("expected tags:")[2]
        at = {"type": "literal_error", "msg": f"Input should be {expected}", "input": given}
    return {**at, "loc": (*error["loc"], "type")}


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
        return _message_of_union(chosen, complaints) or _plain(message)
    if isinstance(value, str) and _NOT_TEXT.fullmatch(value):
        return "only text is supported; fix: send parts of type text"
    if value == "item_reference":
        return "this server stores no items; fix: send the item itself"
    same = [c for c in complaints if c.path == chosen.path and c.error["type"] == "literal_error"]
    expected = dict.fromkeys(name for c in same for name in _QUOTED.findall(str(c.error["msg"])))
    return "Input should be " + " or ".join(f"'{name}'" for name in expected)


def _message_of_union(chosen: _Complaint, complaints: Sequence[_Complaint]) -> str | None:
    """The forms that a union accepts, for a value whose type none of them accepts."""
    same = [c for c in complaints if c.path == chosen.path and _is_of_no_kind(c)]
    taken = [_plain(str(c.error["msg"])).removeprefix(_SHOULD_BE).split(", un")[0] for c in same]
    return _SHOULD_BE + " or ".join(dict.fromkeys(taken)) if chosen in same else None


def _plain(message: str) -> str:
    """The message in the words of JSON instead of Python's."""
    return _DICTIONARY.sub("an object", message)


def _is_of_no_kind(complaint: _Complaint) -> bool:
    """Whether the type of the value itself, not of something in it, is wrong for its branch."""
    is_at_union = complaint.branches and complaint.branches[-1][1] == len(complaint.path)
    return bool(is_at_union and str(complaint.error["msg"]).startswith(_SHOULD_BE))
