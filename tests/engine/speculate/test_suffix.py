"""The suffix automaton against a search, and what a tenant's texts give to whom."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ridgeline._native import SuffixAutomaton, SuffixMatch
from ridgeline.engine.scheduler.speculation.base import DraftContext
from ridgeline.engine.speculate.drafters.base import NO_GUESS
from ridgeline.engine.speculate.drafters.suffix import SuffixDrafter
from ridgeline.records import Sampling

TOKENS = st.lists(st.integers(0, 2), max_size=30)


def contexts(
    tokens: list[int], seq_id: int = 0, tenant: str = "a", num_prompt: int = 1
) -> DraftContext:
    return DraftContext(seq_id, tokens, num_prompt, tenant, Sampling(), 0, 99)


def longest_tail(text: list[int], other: list[int]) -> int:
    """Length of the longest tail of `other` that occurs in `text`."""
    places = range(len(text) + 1)
    lengths = range(min(len(text), len(other)), 0, -1)
    return next(
        (n for n in lengths if any(text[i : i + n] == other[-n:] for i in places)),
        0,
    )


def look(
    automaton: SuffixAutomaton, match: SuffixMatch, read: list[int]
) -> tuple[int, tuple[int, ...]]:
    """All that is known: the length of the match, and what followed it."""
    return automaton.look(match, read, 99, 0, 99, -1) or (match.length, ())


@pytest.mark.slow
@example([([0, 0, 1], [1]), ([0, 1, 1], [1])])
@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=4))
def test_match_is_the_longest_tail_that_occurs(rounds: list[tuple[list[int], list[int]]]) -> None:
    """The text and the reader grow in turn."""
    automaton, match = SuffixAutomaton(), SuffixMatch(0)
    text, read = list[int](), list[int]()
    for fed, other in rounds:
        automaton.feed(fed)
        text += fed
        for token in other:
            read.append(token)
            length, followed = look(automaton, match, read)
            assert length == match.length <= longest_tail(text, read)
            whole, n = read[len(read) - length :] + list(followed), length + len(followed)
            assert any(text[i : i + n] == whole for i in range(len(text) + 1))
    assert look(automaton, SuffixMatch(0), read)[0] == longest_tail(text, read)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=60))
def test_continuation_is_that_of_the_latest_occurrence(text: list[int]) -> None:
    """While fewer tails than the bound are brought up to date: always, in texts this short."""
    automaton = SuffixAutomaton()
    automaton.feed(text)
    for n in range(1, len(text) + 1):
        length, followed = look(automaton, SuffixMatch(0), text[:n][-3:])
        tail = text[:n][len(text[:n]) - length :]
        ends = [i for i in range(len(text)) if text[: i + 1][-length:] == tail]
        assert length and followed == tuple(text[ends[-1] + 1 :][: 2 * length])


def test_drafts_end_at_stop_tokens_and_where_the_match_ends() -> None:
    automaton = SuffixAutomaton()
    automaton.feed([1, 2, 3, -1, 4])
    assert automaton.look(SuffixMatch(0), [1, 2], 9, 0, 9, -1) == (2, (3,))
    assert automaton.look(SuffixMatch(0), [1, 2], 9, 2, 9, -1) is None
    assert automaton.look(SuffixMatch(0), [2, 3], 9, 0, 9, -1) is None
    assert automaton.look(SuffixMatch(0), [1], 9, 0, 1, -1) == (1, (2,))


def test_states_and_steps_are_linear() -> None:
    rng, automaton = random.Random(2), SuffixAutomaton()
    automaton.feed([rng.randrange(3) for _ in range(3000)])
    assert 3000 < automaton.num_states <= 2 * 3000 and automaton.num_tokens == 3000


def test_tenants_do_not_share_answers() -> None:
    drafter = SuffixDrafter()
    assert drafter.look(contexts([1, 5, 6, 7, 8, 9]), 4) == NO_GUESS
    drafter.forget(0, [1, 5, 6, 7, 8, 9], "a")
    assert drafter.look(contexts([2, 5, 6, 7], 1), 4).tokens == (8, 9), "not beyond the text's end"
    assert drafter.look(contexts([2, 5, 6, 7], 2, "b"), 4) == NO_GUESS, "another tenant"
    assert drafter.look(contexts([2, 4, 1, 5], 3), 4) == NO_GUESS, "the prompt is not remembered"


def test_a_longer_match_is_of_a_higher_kind() -> None:
    drafter = SuffixDrafter()
    drafter.look(contexts([0, *range(10, 40)]), 1)
    drafter.forget(0, [0, *range(10, 40)], "a")
    short = drafter.look(contexts([0, 12, 13], 1), 4)
    long = drafter.look(contexts([0, *range(12, 22)], 2), 4)
    assert short.tokens == (14, 15, 16, 17) and long.tokens == (22, 23, 24, 25)
    assert long.kinds > short.kinds and list(long.kinds) == sorted(long.kinds)


def test_shortened_sequence_is_indexed_again() -> None:
    drafter = SuffixDrafter()
    drafter.look(contexts([0, 1, 2, 3, 4]), 1)
    drafter.forget(0, [0, 1, 2, 3, 4], "a")
    drafter.look(contexts([7, 7, 7, 7, 1, 2], 1), 1)
    assert drafter.look(contexts([7, 1, 2], 1), 1).tokens == (3,)


def test_memory_is_bounded_and_the_oldest_tenant_goes_first() -> None:
    rng, drafter = random.Random(3), SuffixDrafter(most_tokens=200, most_in_all=500)
    for seq_id in range(200):
        tenant = f"t{seq_id % 7}"
        tokens = [0, *(rng.randrange(50) for _ in range(rng.randrange(150)))]
        drafter.look(contexts(tokens, seq_id, tenant), 1)
        drafter.forget(seq_id, tokens, tenant)
        assert drafter.num_tokens <= 500 + 100
        assert all(texts.num_tokens <= 2 * 101 + 100 for texts in drafter._texts.values())
    assert tenant in drafter._texts and not drafter._matches and not drafter._num_prompt
