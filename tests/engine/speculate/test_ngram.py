"""Prompt lookup against the plainest way to say it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.engine.core.drafting import Open
from ridgeline.engine.speculate.base import (
    AGAIN,
    AGREES,
    ALONE,
    DIFFERS,
    KINDS,
    NO_GUESS,
    Guess,
    kind_of,
    parts_of,
)
from ridgeline.engine.speculate.ngram import NgramDrafter, copied, num_agreeing
from ridgeline.records import Sampling

SAMPLING = Sampling()
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def opened(tokens: Sequence[int], seq_id: int = 0, tenant: str = "") -> Open:
    return Open(seq_id, tokens, 1, tenant, SAMPLING, 0, 99)


def slow(tokens: list[int], low: int, high: int, depth: int) -> tuple[int, ...]:
    """Longest gram first, latest occurrence; a copy that overlaps the end goes on."""
    for n in range(high, low - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:] and len(tokens) > n:
                out = list(tokens)
                for i in range(depth):
                    out.append(out[start + n + i])
                return tuple(out[len(tokens) :])
    return ()


@given(TEXTS, st.integers(1, 3), st.integers(0, 2), st.integers(1, 8), st.data())
def test_it_finds_what_the_slow_search_finds(
    tokens: list[int], low: int, more: int, depth: int, data: st.DataObject
) -> None:
    """However the text grew: the index is carried on from step to step."""
    drafter = NgramDrafter(low, low + more)
    at = 1
    while at <= len(tokens):
        text = tokens[:at]
        assert drafter.look(opened(text), depth).tokens == slow(text, low, low + more, depth)
        at += data.draw(st.integers(1, 9))


def test_sequences_do_not_see_each_other() -> None:
    drafter = NgramDrafter(1, 3)
    assert drafter.look(opened([1, 2, 3, 1]), 2).tokens == (2, 3)
    assert drafter.look(opened([5, 1], seq_id=1), 2) == NO_GUESS


def test_what_is_forgotten_is_gone() -> None:
    """Ids are never used twice, but a preempted sequence comes back with the same one."""
    drafter = NgramDrafter(1, 3)
    drafter.look(opened([1, 2, 3, 1]), 2)
    drafter.forget(0, [], "")
    assert not drafter._indices
    assert drafter.look(opened([9, 8, 9]), 1).tokens == (8,)


@pytest.mark.parametrize(
    ("text", "length", "told"),
    [
        ([9, 1, 2, 5, 8, 1, 2], 2, ALONE),  # said once, in the answer: a match of two
        ([9, 1, 2, 5, 8, 1, 2, 5, 7, 1, 2], 2, AGREES),  # what followed was the same both times
        ([1, 2, 5, 8, 1, 2, 5, 7, 1, 2, 5, 6, 1, 2], 2, AGAIN),  # all three times
        ([9, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2], 2, DIFFERS),  # it was not
    ],
)
def test_evidence_is_what_was_said_before_and_by_whom(
    text: list[int], length: int, told: int
) -> None:
    def looked(num_prompt: int) -> Guess:
        each = Open(0, text, num_prompt, "", SAMPLING, 0, 99)
        return NgramDrafter(2, 3).look(each, 1)

    assert looked(1).kinds == (kind_of(length, told),)
    assert looked(len(text)).kinds == (kind_of(length, told, own=False),)


def test_every_copied_token_has_its_own_kind() -> None:
    """Once "1 2" was followed by 5, then by 6: whoever copies 3 after it comes past that place."""
    text = [1, 2, 5, 0, 1, 2, 6, 3, 0, 1, 2]
    found = NgramDrafter(2, 3).look(Open(0, text, 1, "", SAMPLING, 0, 99), 9)
    assert found.tokens == (6, 3, 0, 1, 2, 6, 3, 0, 1)
    told = (DIFFERS, ALONE, ALONE, ALONE, AGREES)
    expected = [kind_of(3 + i, each) for i, each in enumerate((*told, *told[:4]))]
    assert list(found.kinds) == expected


def test_a_kind_says_what_it_is_made_of() -> None:
    seen = set[int]()
    for length, told, own in itertools.product((0, 1, 3, 4, 8, 16, 99), range(4), (False, True)):
        kind = kind_of(length, told, own=own)
        assert parts_of(kind + 5 * KINDS) == (min(6, length.bit_length()), told, own)
        seen.add(kind)
    assert len(seen) == 7 * 4 * 2 and max(seen) < KINDS


def test_a_period_is_continued() -> None:
    assert copied([7, 1, 2], 1, 5) == (1, 2, 1, 2, 1)
    assert copied([7, 1, 2], 0, 2) == (7, 1)


@given(TEXTS, st.data())
def test_the_kind_tells_how_long_the_match_is(tokens: list[int], data: st.DataObject) -> None:
    end = data.draw(st.integers(0, len(tokens) - 1))
    lengths = [
        n for n in range(end + 2) if tokens[end + 1 - n : end + 1] == tokens[len(tokens) - n :]
    ]
    assert num_agreeing(tokens, end) == min(32, max(lengths))
    levels = [parts_of(kind_of(n))[0] for n in (0, 1, 2, 3, 4, 8, 16, 32, 99)]
    assert levels == [0, 1, 2, 2, 3, 4, 5, 6, 6]
