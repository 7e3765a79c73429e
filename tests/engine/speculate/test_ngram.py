"""Prompt lookup against the plainest way to say it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.engine.scheduler.speculation.base import DraftContext
from ridgeline.engine.speculate.drafters.base import (
    AGAIN,
    AGREES,
    ALONE,
    DIFFERS,
    KINDS,
    NO_GUESS,
    LookupGuess,
    kind_of,
    parts_of,
)
from ridgeline.engine.speculate.drafters.ngram import NgramDrafter
from ridgeline.records import Sampling
from tests.engine.speculate.slow_lookup import MOST_AGREEING, num_agreeing, slow_guess

SAMPLING = Sampling()
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def contexts(tokens: Sequence[int], seq_id: int = 0, tenant: str = "") -> DraftContext:
    return DraftContext(seq_id, tokens, 1, tenant, SAMPLING, 0, 99)


@given(TEXTS, st.integers(1, 3), st.integers(0, 2), st.integers(0, 12), st.data())
def test_matches_equal_those_of_the_slow_search(
    tokens: list[int], low: int, more: int, depth: int, data: st.DataObject
) -> None:
    """Tokens and kinds, however the text grew: the index is carried on from step to step."""
    drafter = NgramDrafter(low, low + more)
    at, num_prompt = 1, data.draw(st.integers(1, len(tokens)))
    while at <= len(tokens):
        text = tokens[:at]
        each = DraftContext(0, text, num_prompt, "", SAMPLING, 0, 99)
        assert drafter.look(each, depth) == slow_guess(text, low, low + more, num_prompt, depth)
        at += data.draw(st.integers(1, 9))


def test_large_token_ids_and_long_texts_are_indexed() -> None:
    rng = random.Random(3)
    words = [rng.randrange(2**31) for _ in range(40)]
    text = [rng.choice(words) for _ in range(700)]
    drafter = NgramDrafter(2, 4)
    for at in range(300, 700, 37):
        assert drafter.look(contexts(text[:at]), 24) == slow_guess(text[:at], 2, 4, 1, 24)


def test_sequences_are_isolated() -> None:
    drafter = NgramDrafter(1, 3)
    assert drafter.look(contexts([1, 2, 3, 1]), 2).tokens == (2, 3)
    assert drafter.look(contexts([5, 1], seq_id=1), 2) == NO_GUESS


def test_forgotten_sequences_give_no_drafts() -> None:
    """Ids are never used twice, but a preempted sequence comes back with the same one."""
    drafter = NgramDrafter(1, 3)
    drafter.look(contexts([1, 2, 3, 1]), 2)
    drafter.forget(0, [], "")
    assert drafter._texts.num_texts == 0
    assert drafter.look(contexts([9, 8, 9]), 1).tokens == (8,)
    assert drafter.look(contexts([9, 8]), 1) == NO_GUESS, "a text that became shorter is read again"
    assert drafter.look(contexts([9, 7, 9]), 1).tokens == (7,), "and one with another end"


def test_lengths_of_grams_and_tokens_are_checked() -> None:
    for low, high in ((0, 2), (3, 2)):
        with pytest.raises(ValueError, match="grams"):
            NgramDrafter(low, high)
    with pytest.raises(TypeError):
        NgramDrafter(1, 2).look(contexts(["a", "b"]), 1)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("text", "length", "history"),
    [
        ([9, 1, 2, 5, 8, 1, 2], 2, ALONE),  # said once, in the answer: a match of two
        ([9, 1, 2, 5, 8, 1, 2, 5, 7, 1, 2], 2, AGREES),  # what followed was the same both times
        ([1, 2, 5, 8, 1, 2, 5, 7, 1, 2, 5, 6, 1, 2], 2, AGAIN),  # all three times
        ([9, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2], 2, DIFFERS),  # it was not
    ],
)
def test_evidence_depends_on_match_history_and_origin(
    text: list[int], length: int, history: int
) -> None:
    def looked(num_prompt: int) -> LookupGuess:
        each = DraftContext(0, text, num_prompt, "", SAMPLING, 0, 99)
        return NgramDrafter(2, 3).look(each, 1)

    assert looked(1).kinds == (kind_of(length, history),)
    assert looked(len(text)).kinds == (kind_of(length, history, own=False),)


def test_every_copied_token_has_its_own_kind() -> None:
    """ "1 2" was followed by 5, then by 6; a copy that continues with 3 passes that position."""
    text = [1, 2, 5, 0, 1, 2, 6, 3, 0, 1, 2]
    found = NgramDrafter(2, 3).look(DraftContext(0, text, 1, "", SAMPLING, 0, 99), 9)
    assert found.tokens == (6, 3, 0, 1, 2, 6, 3, 0, 1)
    history = (DIFFERS, ALONE, ALONE, ALONE, AGREES)
    expected = [kind_of(3 + i, each) for i, each in enumerate((*history, *history[:4]))]
    assert list(found.kinds) == expected


def test_kinds_round_trip_through_their_parts() -> None:
    seen = set[int]()
    for length, history, own in itertools.product((0, 1, 3, 4, 8, 16, 99), range(4), (False, True)):
        kind = kind_of(length, history, own=own)
        assert parts_of(kind + 5 * KINDS) == (min(6, length.bit_length()), history, own)
        seen.add(kind)
    assert len(seen) == 7 * 4 * 2 and max(seen) < KINDS


@pytest.mark.slow
@given(TEXTS, st.data())
def test_evidence_kind_states_the_match_length(tokens: list[int], data: st.DataObject) -> None:
    end = data.draw(st.integers(0, len(tokens) - 1))
    lengths = [
        n for n in range(end + 2) if tokens[end + 1 - n : end + 1] == tokens[len(tokens) - n :]
    ]
    assert num_agreeing(tokens, end) == min(MOST_AGREEING, max(lengths))
    levels = [parts_of(kind_of(n))[0] for n in (0, 1, 2, 3, 4, 8, 16, 32, 99)]
    assert levels == [0, 1, 2, 2, 3, 4, 5, 6, 6]
