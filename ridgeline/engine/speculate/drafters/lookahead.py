"""Lookahead decoding: the model itself guesses tokens that are still ahead; no draft model.

What. Rows of a step that turn out to be wrong still say something: behind a guessed token g stands
what the model would say after g. A row's outcome becomes the next guess for the place behind it (a
Jacobi iteration, which ends at what plain decoding says), and runs of them that agree with one
another go into the sequence's pool of n-grams. A draft is the n-gram that begins with the last two
known tokens, or with the last one, chained while the pool knows more, and behind it the window
under iteration.

Source. Lookahead decoding (Fu et al. 2024, arXiv 2402.02057); Jacobi decoding (Santilli et al.
2023). Here the window rides behind the verified n-gram in one chain; there both are branches of a
masked step. One branch instead of many: fewer rows per step, and fewer n-grams won by it.

Invariant. What a pool holds comes from this sequence alone. Answers never depend on it (`walk.py`).
When it loses. Nearly always where rows cost: most rows of the window are wrong for some steps. It
needs a step in which further rows are nearly free.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ridgeline.engine.sampling.base import Choice
from ridgeline.engine.scheduler.plan import Run
from ridgeline.engine.scheduler.speculation.base import DraftContext
from ridgeline.engine.speculate.drafters.base import Guess, kind_of

MOST_GRAMS = 4096  # of a sequence's pool; the oldest go first
LONGEST = 8  # tokens behind the first of an n-gram
WINDOW = 3  # places at least, of a deep enough draft, that are left to the iteration
NOBODY = -1  # no token


class _Pool:
    """What the model said lately after each token, and after each pair; the window under iteration;
    and the known token before the last one."""

    __slots__ = ("before", "grams", "window")

    def __init__(self) -> None:
        self.grams: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.before = NOBODY
        self.window: tuple[int, ...] = ()

    def put(self, first: tuple[int, ...], rest: tuple[int, ...]) -> None:
        self.grams.pop(first, None)
        self.grams[first] = rest
        if len(self.grams) > MOST_GRAMS:
            self.grams.pop(next(iter(self.grams)))

    def chain(self, before: int, last: int, most: int) -> list[int]:
        """N-gram after n-gram, from `before`, `last` on."""
        found, grams = [before, last], self.grams
        while len(found) < most + 2:
            rest = grams.get((found[-2], found[-1])) or grams.get((found[-1],))
            if rest is None:
                break
            found += rest
        return found[2 : most + 2]


class LookaheadDrafter:
    """See the head of this file. `watch` is to be told of every verified run."""

    name = "lookahead"

    def __init__(self) -> None:
        self._pools: dict[int, _Pool] = {}

    def look(self, each: DraftContext, most: int) -> Guess:
        pool = self._pools.setdefault(each.seq_id, _Pool())
        pool.before = each.tokens[-2] if len(each.tokens) > 1 else NOBODY
        chained = pool.chain(pool.before, each.tokens[-1], max(1, most - WINDOW))
        window = pool.window or tuple(each.tokens[-most:])
        tokens = (*chained, *window)[:most]
        kinds = [kind_of(max(0, len(chained) - i)) for i in range(len(tokens))]
        return Guess(tokens, tuple(kinds))

    def watch(self, run: Run, chosen: Sequence[Choice]) -> None:
        """`chosen`: what the model says at the run's last known token and at each draft, the
        refused ones too."""
        pool = self._pools.get(run.seq_id)
        if pool is None:
            return
        fed = run.tokens[len(run.tokens) - run.max_outputs :]
        said = [token for token, _ in chosen]
        for i, (before, first) in enumerate(pairwise((pool.before, *fed))):
            rest = _agreeing(fed, said, i)
            pool.put((before, first), rest)
            pool.put((first,), rest)
        num_kept = next((i for i in range(len(fed) - 1) if fed[i + 1] != said[i]), len(fed) - 1)
        pool.before = fed[num_kept]
        pool.window = tuple(said[num_kept + 1 :])

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        self._pools.pop(seq_id, None)


def _agreeing(fed: Sequence[int], said: Sequence[int], i: int) -> tuple[int, ...]:
    """What was said after row i, and on as long as the next row was fed just that."""
    found = [said[i]]
    while i + 1 < len(fed) and fed[i + 1] == found[-1] and len(found) < LONGEST:
        i += 1
        found.append(said[i])
    return tuple(found)
