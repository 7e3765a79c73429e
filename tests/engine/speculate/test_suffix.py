"""The suffix automaton against a search, and what a tenant's texts give to whom."""

from __future__ import annotations

import random

from hypothesis import example, given
from hypothesis import strategies as st

from ridgeline.engine.core.drafting import Open
from ridgeline.engine.speculate.automaton import Automaton, Reader
from ridgeline.engine.speculate.base import NO_GUESS
from ridgeline.engine.speculate.suffix import SuffixDrafter
from ridgeline.records import Sampling

TOKENS = st.lists(st.integers(0, 2), max_size=30)


def opened(tokens: list[int], seq_id: int = 0, tenant: str = "a", num_prompt: int = 1) -> Open:
    return Open(seq_id, tokens, num_prompt, tenant, Sampling(), 0, 99)


def longest_tail(text: list[int], other: list[int]) -> int:
    """Length of the longest tail of `other` that occurs in `text`."""
    places = range(len(text) + 1)
    lengths = range(min(len(text), len(other)), 0, -1)
    return next(
        (n for n in lengths if any(text[i : i + n] == other[-n:] for i in places)),
        0,
    )


@example([([0, 0, 1], [1]), ([0, 1, 1], [1])])
@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=4))
def test_a_reader_stands_on_its_longest_tail(turns: list[tuple[list[int], list[int]]]) -> None:
    """The text and the reader grow in turn."""
    automaton, reader = Automaton(), Reader()
    read: list[int] = []
    for text, other in turns:
        for token in text:
            automaton.feed(token)
        for token in other:
            read.append(token)
            automaton.follow(reader, [token])
            assert reader.length <= longest_tail(automaton.text, read)
            if reader.length:
                place, n = automaton.place(reader), reader.length
                assert automaton.text[place + 1 - n : place + 1] == read[-n:]
    fresh = Reader()
    automaton.follow(fresh, read)
    assert fresh.length == longest_tail(automaton.text, read)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=60))
def test_the_latest_place_is_told(text: list[int]) -> None:
    """While fewer tails than the bound are brought up to date: always, in texts this short."""
    automaton, reader = Automaton(), Reader()
    for token in text:
        automaton.feed(token)
    for n in range(1, len(text) + 1):
        reader = Reader()
        automaton.follow(reader, text[:n][-3:])
        if reader.length:
            tail = text[:n][-reader.length :]
            ends = [i for i in range(len(text)) if text[: i + 1][-len(tail) :] == tail]
            assert automaton.place(reader) == ends[-1]


def test_states_and_steps_are_linear() -> None:
    rng, automaton = random.Random(2), Automaton()
    for _ in range(3000):
        automaton.feed(rng.randrange(3))
    assert len(automaton._next) <= 2 * 3000


def test_what_a_tenant_was_answered_is_drafted_for_it_alone() -> None:
    drafter = SuffixDrafter()
    assert drafter.look(opened([1, 5, 6, 7, 8, 9]), 4) == NO_GUESS
    drafter.forget(0, [1, 5, 6, 7, 8, 9], "a")
    assert drafter.look(opened([2, 5, 6, 7], 1), 4).tokens == (8, 9), "not beyond the text's end"
    assert drafter.look(opened([2, 5, 6, 7], 2, "b"), 4) == NO_GUESS, "another tenant"
    assert drafter.look(opened([2, 4, 1, 5], 3), 4) == NO_GUESS, "the prompt is not remembered"


def test_a_longer_match_is_of_a_higher_kind() -> None:
    drafter = SuffixDrafter()
    drafter.look(opened([0, *range(10, 40)]), 1)
    drafter.forget(0, [0, *range(10, 40)], "a")
    short = drafter.look(opened([0, 12, 13], 1), 4)
    long = drafter.look(opened([0, *range(12, 22)], 2), 4)
    assert short.tokens == (14, 15, 16, 17) and long.tokens == (22, 23, 24, 25)
    assert long.kinds > short.kinds and list(long.kinds) == sorted(long.kinds)


def test_a_sequence_that_comes_back_shorter_is_read_anew() -> None:
    drafter = SuffixDrafter()
    drafter.look(opened([0, 1, 2, 3, 4]), 1)
    drafter.forget(0, [0, 1, 2, 3, 4], "a")
    drafter.look(opened([7, 7, 7, 7, 1, 2], 1), 1)
    assert drafter.look(opened([7, 1, 2], 1), 1).tokens == (3,)


def test_memory_is_bounded_and_the_oldest_tenant_goes_first() -> None:
    rng, drafter = random.Random(3), SuffixDrafter(most_tokens=200, most_in_all=500)
    for seq_id in range(200):
        tenant = f"t{seq_id % 7}"
        tokens = [0, *(rng.randrange(50) for _ in range(rng.randrange(150)))]
        drafter.look(opened(tokens, seq_id, tenant), 1)
        drafter.forget(seq_id, tokens, tenant)
        assert drafter.num_tokens <= 500 + 100
        assert all(texts.num_tokens <= 2 * 101 + 100 for texts in drafter._texts.values())
    assert tenant in drafter._texts and not drafter._seats and not drafter._num_prompt
