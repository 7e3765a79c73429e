"""Lookahead decoding: the model itself guesses tokens further ahead, without a draft model.

Rows of a step that turn out wrong are still informative: after a guessed token g stands what the
model would generate after g. A row's output becomes the next guess for the position after it (a
Jacobi iteration, whose fixed point is plain decoding), and consistent runs enter the sequence's
pool of n-grams. A draft is the n-gram that starts with the last two known tokens, or with the last
one, extended while the pool allows, followed by the window under iteration.

Source: Lookahead decoding (Fu et al. 2024, arXiv 2402.02057); Jacobi decoding (Santilli et al.
2023). Here the window follows the verified n-gram in one chain; there both are branches of a masked
step. One branch means fewer rows per step, and fewer n-grams collected.

Invariant: a pool is filled by its own sequence only. Output never depends on it. When it loses:
almost always where rows cost time, because most rows of the window are wrong for some steps. It
needs steps in which additional rows are nearly free.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ridgeline.engine.sampling.base import Choice
from ridgeline.engine.scheduler.plan import Run
from ridgeline.engine.scheduler.speculation.base import DraftContext
from ridgeline.engine.speculate.drafters.base import LookupGuess, kind_of

MAX_GRAMS = 4096  # of a sequence's pool; the oldest go first
LONGEST = 8  # tokens behind the first of an n-gram
WINDOW = 3  # places at least, of a deep enough draft, that are left to the iteration
NO_TOKEN = -1


class _NgramPool:
    """Recent outputs of the model after each token and each pair, and the Jacobi window."""

    __slots__ = ("before", "grams", "window")

    def __init__(self) -> None:
        self.grams: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.before = NO_TOKEN
        self.window: tuple[int, ...] = ()

    def put(self, first: tuple[int, ...], rest: tuple[int, ...]) -> None:
        self.grams.pop(first, None)
        self.grams[first] = rest
        if len(self.grams) > MAX_GRAMS:
            self.grams.pop(next(iter(self.grams)))

    def chain(self, before: int, last: int, most: int) -> list[int]:
        """N-gram after n-gram, continuing from `before`, `last`."""
        found, grams = [before, last], self.grams
        while len(found) < most + 2:
            rest = grams.get((found[-2], found[-1])) or grams.get((found[-1],))
            if rest is None:
                break
            found += rest
        return found[2 : most + 2]


class LookaheadDrafter:
    """Drafts from n-grams of the model's own rejected rows; `watch` must see every verified run."""

    name = "lookahead"

    def __init__(self) -> None:
        self._pools: dict[int, _NgramPool] = {}

    def look(self, context: DraftContext, most: int) -> LookupGuess:
        pool = self._pools.setdefault(context.seq_id, _NgramPool())
        pool.before = context.tokens[-2] if len(context.tokens) > 1 else NO_TOKEN
        chained = pool.chain(pool.before, context.tokens[-1], max(1, most - WINDOW))
        window = pool.window or tuple(context.tokens[-most:])
        tokens = (*chained, *window)[:most]
        kinds = [kind_of(max(0, len(chained) - i)) for i in range(len(tokens))]
        return LookupGuess(tokens, tuple(kinds))

    def watch(self, run: Run, chosen: Sequence[Choice]) -> None:
        """`chosen`: the model's output at the run's last known token and at each draft, rejected
        ones included.
        """
        pool = self._pools.get(run.seq_id)
        if pool is None:
            return
        fed = run.tokens[len(run.tokens) - run.max_outputs :]
        said = [token for token, _ in chosen]
        for i, (before, first) in enumerate(pairwise((pool.before, *fed))):
            rest = _consistent_run(fed, said, i)
            pool.put((before, first), rest)
            pool.put((first,), rest)
        num_kept = next((i for i in range(len(fed) - 1) if fed[i + 1] != said[i]), len(fed) - 1)
        pool.before = fed[num_kept]
        pool.window = tuple(said[num_kept + 1 :])

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        self._pools.pop(seq_id, None)


def _consistent_run(fed: Sequence[int], said: Sequence[int], i: int) -> tuple[int, ...]:
    """What was generated after row i, continued while the next row was fed exactly that."""
    found = [said[i]]
    while i + 1 < len(fed) and fed[i + 1] == found[-1] and len(found) < LONGEST:
        i += 1
        found.append(said[i])
    return tuple(found)
