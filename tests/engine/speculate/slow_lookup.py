"""Prompt lookup, the record of its guesses and the choice of depths, the plain way: what
`native/speculation/drafts.h` is compared with."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.engine.speculate.depth_control.lookup_accuracy import prior
from ridgeline.engine.speculate.depth_control.plan import MIN_CHANCE
from ridgeline.engine.speculate.drafters.base import (
    AGAIN,
    AGREES,
    ALONE,
    DIFFERS,
    LookupGuess,
    kind_of,
)

MOST_AGREEING = 32


def slow_search(tokens: Sequence[int], low: int, high: int) -> int | None:
    """Where the longest gram that ends the text ended the last time before."""
    for n in range(high, low - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                return start + n - 1
    return None


def slow_history(tokens: Sequence[int], low: int, high: int) -> list[int]:
    """The history of each position, as known before its token."""
    history = [ALONE]
    for place in range(1, len(tokens)):
        end = slow_search(tokens[:place], low, high)
        if end is None:
            history.append(ALONE)
        elif tokens[end + 1] != tokens[place]:
            history.append(DIFFERS)
        else:
            history.append(AGAIN if history[end + 1] >= AGREES else AGREES)
    return history


def num_agreeing(tokens: Sequence[int], end: int) -> int:
    """Number of tokens up to position `end` that match the end of the text."""
    num = 0
    while num <= min(end, MOST_AGREEING - 1) and tokens[end - num] == tokens[-1 - num]:
        num += 1
    return num


def slow_guess(
    tokens: Sequence[int], low: int, high: int, num_prompt: int, most: int
) -> LookupGuess:
    """A copy that overlaps the end continues with the copied tokens."""
    end = slow_search(tokens, low, high)
    if end is None:
        return LookupGuess((), ())
    history, length, period = (
        slow_history(tokens, low, high),
        num_agreeing(tokens, end),
        len(tokens) - end - 1,
    )
    places = [end + 1 + i % period for i in range(most)]
    kinds = [
        kind_of(length + i, history[place], own=place >= num_prompt)
        for i, place in enumerate(places)
    ]
    return LookupGuess(tuple(tokens[place] for place in places), tuple(kinds))


class SlowShadows:
    """How often tokens of a kind were right: of all sequences, and of each."""

    def __init__(self) -> None:
        self.all: dict[int, tuple[float, float]] = {}
        self.own: dict[int, dict[int, tuple[float, float]]] = {}

    def judge(self, seq_id: int, guess: LookupGuess, came: Sequence[int]) -> None:
        own = self.own.setdefault(seq_id, {})
        for token, kind, true in zip(guess.tokens, guess.kinds, came, strict=False):
            for counts, fade in ((self.all, 0.99), (own, 0.85)):
                right, num = counts.get(kind, (0.0, 0.0))
                counts[kind] = right * fade + (token == true), num * fade + 1
            if token != true:
                return

    def survivals(self, seq_id: int, kinds: Sequence[int]) -> list[float]:
        found, alive, own = list[float](), 1.0, self.own.get(seq_id, {})
        for kind in kinds:
            right, num = self.all.get(kind, (0.0, 0.0))
            chance = (right + 2.0 * prior(kind)) / (num + 2.0)
            if kind in own:
                right, num = own[kind]
                chance = (right + 3.0 * chance) / (num + 3.0)
            alive *= chance
            if alive < MIN_CHANCE:
                break
            found.append(alive)
        return found


def slow_depths(
    survivals: Sequence[Sequence[float]],
    computed: Sequence[bool],
    num_free: int,
    plain: tuple[int, float],
    line: Sequence[float],
    drafting_s: Sequence[float],
) -> tuple[list[int], float, float]:
    """Tokens in order of falling chance; the number at which tokens per second are highest.
    `plain`: tokens and seconds without drafts."""
    order = sorted(
        (-chance, place, i)
        for i, own in enumerate(survivals)
        for place, chance in enumerate(own)
        if chance >= MIN_CHANCE
    )
    best, depths, deepest, tokens = (*plain, 0), [0] * len(survivals), 0, float(plain[0])
    for num, (chance, place, i) in enumerate(order[:num_free], 1):
        tokens -= chance
        deepest = max(deepest, place + 1) if computed[i] and drafting_s else deepest
        seconds = line[num - 1] + (drafting_s[deepest - 1] if deepest else 0.0)
        if tokens / seconds > best[0] / best[1]:
            best = tokens, seconds, num
    for _, place, i in order[: best[2]]:
        depths[i] = max(depths[i], place + 1)
    return depths, best[0], best[1]
