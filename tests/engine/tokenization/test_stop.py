"""Stop strings across any borders, against text that arrives one character at a time."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ridgeline.engine.tokenization import load_tokenizer
from ridgeline.engine.tokenization.output import OutputText
from ridgeline.engine.tokenization.stop import (
    NoStops,
    StopMatcher,
    StopStrings,
    StopsWithSpecialTokens,
    make_stops,
)
from ridgeline.records import Sampling

LETTERS = st.text("ab", max_size=14)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def feed(stops: StopMatcher, texts: list[str]) -> tuple[str, str | None]:
    shown = ""
    for text in texts:
        more, stop = stops.push(text)
        shown += more
        if stop is not None:
            return shown, stop
    return shown + stops.flush(), None


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            stop = max(matching, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(LETTERS, max_size=5), STOPS, st.booleans())
@example(["a", "ab"], ["aab"], False)
@example(["abab"], ["bab", "ab"], False)
def test_result_does_not_depend_on_piece_boundaries(
    texts: list[str], stops: list[str], include: bool
) -> None:
    found = feed(StopStrings(stops, include=include), texts)
    assert found == expected("".join(texts), stops, include)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(LETTERS, STOPS)
def test_no_prefix_of_a_stop_string_is_emitted(text: str, stops: list[str]) -> None:
    """Whatever follows, what was shown stays right; and no more is held than need be."""
    waiting = StopStrings(stops)
    shown, stop = waiting.push(text)
    if stop is None:
        held = waiting.flush()
        assert shown + held == text
        assert not held or any(stop.startswith(held) for stop in stops)


MARK = "X"
OVER_SPECIAL = st.lists(st.text("abX", min_size=2, max_size=4).filter(lambda s: MARK in s))


def expected_with_special(
    raw: str, stops: list[str], over_special: list[str], include: bool
) -> tuple[str, str | None]:
    """Each X is a special token, which the delivered text lacks."""
    for end in range(1, len(raw) + 1):
        starts: list[tuple[int, str]] = []
        seen = raw[:end]
        starts += [(end - len(stop), stop) for stop in over_special if seen.endswith(stop)]
        if raw[end - 1] != MARK:
            visible = [place for place in range(end) if raw[place] != MARK]
            text = seen.replace(MARK, "")
            starts += [(visible[-len(stop)], stop) for stop in stops if text.endswith(stop)]
        if starts:
            start, stop = min(starts)
            return raw[:start].replace(MARK, "") + (stop if include else ""), stop
    return raw.replace(MARK, ""), None


@pytest.mark.slow
@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(st.text("abX", max_size=6), max_size=5), STOPS, OVER_SPECIAL, st.booleans())
@example(["a", "Xb"], ["ab"], ["aXa"], False)
@example(["aX", "ab"], ["ab"], ["Xa"], True)
def test_stop_strings_see_special_tokens_that_the_text_lacks(
    texts: list[str], stops: list[str], over_special: list[str], include: bool
) -> None:
    raw = "".join(texts)
    if not over_special:
        return
    matcher = StopsWithSpecialTokens(stops, over_special, include=include)
    shown, found = "", None
    for piece in re.findall("[ab]X?|X", raw):  # a token is a special one, or none
        more, found = matcher.push(piece.removesuffix(MARK), MARK if MARK in piece else "")
        shown += more
        if found is not None:
            break
    shown += "" if found else matcher.flush()
    assert (shown, found) == expected_with_special(raw, stops, over_special, include)


def test_text_passes_unchanged_without_stop_strings() -> None:
    assert isinstance(make_stops((), include=False), NoStops)
    assert feed(NoStops(), ["a", "b"]) == ("ab", None)


def output(text: str, sampling: Sampling) -> tuple[str, str | None, int]:
    """(shown text, stop string, tokens used) of a demo answer."""
    tokenizer = load_tokenizer("demo")
    growing, shown, num_tokens = OutputText.begin(tokenizer, [], sampling), "", 0
    for token in tokenizer.encode(text):
        num_tokens += 1
        more, stop = growing.push(token)
        shown += more
        if stop is not None:
            return shown, stop, num_tokens
    more, stop = growing.flush()
    return shown + more, stop, num_tokens


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_may_span_tokens_and_split_characters(include: bool) -> None:
    sampling = Sampling(stop=("你👩x",), include_stop_str_in_output=include)
    shown, stop, _ = output("héllo 你好你👩xyz", sampling)
    assert stop == "你👩x"
    assert shown == ("héllo 你好你👩x" if include else "héllo 你好")


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    text = "def a(): pass\ndef b(): pass"
    early = output(text, Sampling(stop=("def",)))
    late = output(text, Sampling(stop=("def",), min_tokens=3))
    assert early[:2] == ("", "def") and late[1] == "def" and len(late[0]) > 5


def test_text_held_back_comes_with_the_flush() -> None:
    assert output("abc", Sampling(stop=("cde",)))[:2] == ("abc", None)
