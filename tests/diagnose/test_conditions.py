"""The language of rules and preconditions: what it says, and what it refuses to read."""

from __future__ import annotations

import pytest

from ridgeline.diagnose.conditions import all_hold, fill, parse, written


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("slots == 1", True),
        ("slots < 1", False),
        ("share > 0.5 * limit", True),
        ("share > limit", False),
        ("batching != 'static'", False),
        ("cache == false", True),
        ("quantization == none", True),
        ("absent > 1", None),
        ("slots > absent", None),
        ("batching > 3", None),
    ],
)
def test_a_condition_holds_fails_or_is_unknown(text: str, expected: bool | None) -> None:
    facts = {
        "slots": 1,
        "share": 0.4,
        "limit": 0.5,
        "batching": "static",
        "cache": False,
        "quantization": None,
    }
    assert parse(text).holds(facts) is expected


@pytest.mark.parametrize(
    "text", ["", "slots", "slots = 1", "slots < ", "f(x) > 1", "a < 'x", "a < 1 + 2"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse(text)


def test_one_false_beats_one_unknown() -> None:
    both = (parse("a > 1"), parse("absent > 1"))
    assert all_hold(both, {"a": 0}) is False
    assert all_hold(both, {"a": 2}) is None
    assert all_hold(both, {"a": 2, "absent": 2}) is True


def test_numbers_are_written_in_the_unit_of_their_name() -> None:
    facts = {"a_s": 0.0123, "b_share": 0.5, "c_bytes": 2e6, "d": 3, "e_tok_s": 12.34, "f_s": 2.5}
    assert fill("{a_s} {b_share} {c_bytes} {d} {e_tok_s} {f_s}", facts) == (
        "12.3 ms 50% 2 MB 3 12.3/s 2.5 s"
    )
    assert written("absent", facts) == "unknown"


def test_a_bracketed_part_needs_all_of_its_facts() -> None:
    template = "Waiting for a slot[ of {slots}][, cache {used_share} full, {absent}]."
    assert fill(template, {"slots": 4, "used_share": 0.5}) == "Waiting for a slot of 4."
    assert fill(template, {}) == "Waiting for a slot."
