"""What the runner does with the logits of a step: one token per run, or as many as its draft earns.

Drafts named with certainty, and every draft of a request that is greedy or has a seed, are walked
(`walk.py`): the tokens are those of plain decoding. Drafts that were drawn (the drafter notes their
distributions in `DraftDistributions`) are verified by rejection (`rejection.py`).

Shapes: S rows, K drafts of a run, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain, islice
from typing import NamedTuple

from torch import Tensor

from ridgeline.engine.sampling import probabilities, sample, token_logprobs
from ridgeline.engine.sampling.base import Choice
from ridgeline.engine.sampling.uniform import uniform
from ridgeline.engine.sampling.verify.exact_match import accept_matching, count_matching
from ridgeline.engine.sampling.verify.rejection_sampling import (
    RULES,
    TreeDraws,
    TreePath,
    accept_tree,
    draw,
    uniform_numbers,
    verify_draft,
)
from ridgeline.engine.scheduler.plan import Run, SamplePoint, draft_paths
from ridgeline.engine.structured_output.base import asks_for_mask


class PathOutput(NamedTuple):
    """The path that a run with branches has taken, and what it gives."""

    path: int
    choices: list[Choice]


RowObserver = Callable[[Run, Sequence[Choice]], None]


class DraftDistributions:
    """What drafts were drawn from, by sequence: a drafter writes it, the verifier of the same step
    reads it."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[tuple[int, ...], Tensor]] = {}
        self._trees: dict[int, TreeDraws] = {}

    def clear(self) -> None:
        self._rows.clear()
        self._trees.clear()

    def record_tree(self, seq_id: int, places: TreeDraws) -> None:
        self._trees[seq_id] = places

    def tree_of(self, run: Run) -> TreeDraws | None:
        """What the guesses of a run's tree were drawn from; None if they were not."""
        return self._trees.get(run.seq_id) if run.num_drafts else None

    def record(self, seq_id: int, drafts: tuple[int, ...], q_KV: Tensor) -> None:
        self._rows[seq_id] = drafts, q_KV

    def of(self, run: Run) -> Tensor | None:
        """q_KV of the run's drafts (they may have been cut short); None if they were not drawn."""
        drafts, q_KV = self._rows.get(run.seq_id, ((), None))
        if q_KV is None or not run.num_drafts or drafts[: run.num_drafts] != run.drafts:
            return None
        return q_KV[: run.num_drafts]


class Verifier:
    """`method`: the rule by which drawn drafts are judged. `row_observer` is told what the model says at
    every row of walked runs."""

    def __init__(
        self,
        method: str = "block",
        drawn: DraftDistributions | None = None,
        row_observer: RowObserver | None = None,
    ) -> None:
        self._rule, self._drawn, self._row_observer = (
            RULES[method],
            drawn or DraftDistributions(),
            row_observer,
        )

    @property
    def has_row_observer(self) -> bool:
        """Whether somebody is told what the model says at every row."""
        return self._row_observer is not None

    def accept_argmax(self, tokens: Sequence[int], runs: Sequence[Run]) -> list[tuple[int, ...]]:
        """What each run gives where the model names one token at each of its rows."""
        if len(tokens) == len(runs) and not self.has_row_observer:
            return [(token,) for token in tokens]
        self._shown([(token, None) for token in tokens], runs)
        left = iter(tokens)
        return [_head(run.drafts, list(islice(left, run.max_outputs))) for run in runs]

    def accept_argmax_trees(self, tokens: Sequence[int], runs: Sequence[Run]) -> list[PathOutput]:
        """As `accept_argmax` for runs with branches; rows are those of their paths, one after the other."""
        left = iter(tokens)
        return [
            walk_tree([[(next(left), None) for _ in range(p.max_outputs)] for p in every], every)
            for every in map(draft_paths, runs)
        ]

    def accept_trees(
        self, logits_SV: Tensor, runs: Sequence[Run], at: Sequence[SamplePoint]
    ) -> list[PathOutput]:
        """As `choices` for runs with branches."""
        every = [draft_paths(run) for run in runs]
        drawn = [self._drawn.tree_of(run) for run in runs]
        ends = accumulate(path.max_outputs for own in every for path in own)
        left = (range(e - p.max_outputs, e) for e, p in zip(ends, chain(*every), strict=True))
        rows = [list(islice(left, len(own))) for own in every]
        walked = [
            row
            for places, mine in zip(drawn, rows, strict=True)
            if places is None
            for path_rows in mine
            for row in path_rows
        ]
        found = dict(zip(walked, sample(logits_SV[walked], [at[i] for i in walked]), strict=True))
        return [
            walk_tree([[found[row] for row in own] for own in mine], own_paths)
            if places is None
            else self._down(logits_SV, own_paths, mine, at, places)
            for own_paths, mine, places in zip(every, rows, drawn, strict=True)
        ]

    def _down(
        self,
        logits_SV: Tensor,
        every: Sequence[Run],
        rows: Sequence[range],
        at: Sequence[SamplePoint],
        places: TreeDraws,
    ) -> PathOutput:
        """A tree whose guesses were drawn."""
        leaves = [ranks_of(path.drafts, places) for path in every]

        def through(node: TreePath) -> int:
            return next(i for i, leaf in enumerate(leaves) if leaf[: len(node)] == node)

        def p_of(node: TreePath) -> Tensor:
            row = rows[through(node)][len(node)]
            return probabilities(logits_SV[row : row + 1], [at[row]])[0]

        first = at[rows[0][0]]
        count = sum(len(own) for own in places.draws)
        accept = uniform_numbers(first.seed, first.index, count)
        node, weight_V = accept_tree(leaves, p_of, places, accept)
        last = draw(weight_V, uniform(first.seed, first.index + len(node)))
        tokens, own = [*places.tokens_of(node), last], rows[through(node)]
        logits_KV = logits_SV[own.start : own.start + len(tokens)]
        return PathOutput(through(node), _with_logprobs(logits_KV, first, tokens))

    def accept(
        self, logits_SV: Tensor, runs: Sequence[Run], at: Sequence[SamplePoint]
    ) -> list[list[Choice]]:
        """What each run gives; rows (and `at`) belong to runs in order, `max_outputs` each."""
        if not any(run.num_drafts for run in runs) and self._row_observer is None:
            return _plain(sample(logits_SV, at), runs)
        drawn = {i: q for i, run in enumerate(runs) if (q := self._drawn.of(run)) is not None}
        if not drawn:
            return _walked(self._shown(sample(logits_SV, at), runs), runs)
        ends = accumulate(run.max_outputs for run in runs)
        rows = [range(end - run.max_outputs, end) for run, end in zip(runs, ends, strict=True)]
        walked = [row for i, own in enumerate(rows) if i not in drawn for row in own]
        chosen = sample(logits_SV[walked], [at[row] for row in walked]) if walked else []
        others = [runs[i] for i in range(len(runs)) if i not in drawn]
        found = iter(_walked(chosen, others))
        return [
            self._judged(logits_SV[own.start : own.stop], run, [at[row] for row in own], drawn[i])
            if i in drawn
            else next(found)
            for i, (run, own) in enumerate(zip(runs, rows, strict=True))
        ]

    def _shown(self, chosen: list[Choice], runs: Sequence[Run]) -> list[Choice]:
        if self._row_observer is not None:
            left = iter(chosen)
            for run in runs:
                if run.max_outputs:
                    self._row_observer(run, list(islice(left, run.max_outputs)))
        return chosen

    def _judged(
        self, logits_KV: Tensor, run: Run, at: Sequence[SamplePoint], q_KV: Tensor
    ) -> list[Choice]:
        p_KV = probabilities(logits_KV, at)
        tokens = verify_draft(self._rule, p_KV, q_KV, run.drafts, at[0].seed, at[0].index)
        return _with_logprobs(logits_KV, at[0], tokens)


def with_raw_logprobs(
    drawn: Sequence[list[Choice]], raw_SV: Tensor, runs: Sequence[Run], at: Sequence[SamplePoint]
) -> list[list[Choice]]:
    """What the runs gave, with log-probabilities of the logits as they were before any mask. Rows
    that nobody masked keep theirs to the bit."""
    firsts = accumulate((run.max_outputs for run in runs), initial=0)
    return [
        _with_raw_logprobs(own, raw_SV, first, at)
        for own, first in zip(drawn, firsts, strict=False)
    ]


def with_raw_logprobs_of_trees(
    taken: Sequence[PathOutput],
    raw_SV: Tensor,
    every: Sequence[Sequence[Run]],
    at: Sequence[SamplePoint],
) -> list[PathOutput]:
    """As `with_raw_logprobs`; `every`: the paths of each run, whose rows follow one another."""
    firsts = list(accumulate((path.max_outputs for path in chain(*every)), initial=0))
    starts = accumulate((len(own) for own in every), initial=0)
    return [
        PathOutput(own.path, _with_raw_logprobs(own.choices, raw_SV, firsts[start + own.path], at))
        for own, start in zip(taken, starts, strict=False)
    ]


def _with_raw_logprobs(
    own: list[Choice], raw_SV: Tensor, first: int, at: Sequence[SamplePoint]
) -> list[Choice]:
    if not own or not asks_for_mask(at[first : first + 1]):
        return own
    raw_KV = raw_SV[first : first + len(own)]
    return _with_logprobs(raw_KV, at[first], [token for token, _ in own])


def walk_tree(rows: Sequence[Sequence[Choice]], every: Sequence[Run]) -> PathOutput:
    """Walk down a tree: `rows[i]` are the model's choices along path i."""
    if not every[0].max_outputs:
        return PathOutput(0, [])
    alive, given = list(range(len(every))), [rows[0][0]]
    while True:
        place, token = len(given) - 1, given[-1][0]
        alive_now = [i for i in alive if every[i].drafts[place : place + 1] == (token,)]
        if not alive_now:
            return PathOutput(alive[0], given)
        alive = alive_now
        given.append(rows[alive[0]][place + 1])


def ranks_of(drafts: Sequence[int], places: TreeDraws) -> TreePath:
    """Which of each place's guesses a chain is made of."""
    return tuple(own.index(token) for own, token in zip(places.draws, drafts, strict=False))


def _plain(chosen: Sequence[Choice], runs: Sequence[Run]) -> list[list[Choice]]:
    """No run carries drafts."""
    left = iter(chosen)
    return [[next(left)] if run.sample is not None else [] for run in runs]


def _walked(chosen: Sequence[Choice], runs: Sequence[Run]) -> list[list[Choice]]:
    left = iter(chosen)
    return [accept_matching(run.drafts, list(islice(left, run.max_outputs))) for run in runs]


def _head(drafts: Sequence[int], named: Sequence[int]) -> tuple[int, ...]:
    return tuple(named[: count_matching(drafts, named) + 1])


def _with_logprobs(logits_KV: Tensor, at: SamplePoint, tokens: Sequence[int]) -> list[Choice]:
    k = at.sampling.logprobs
    if k is None:
        return [(token, None) for token in tokens]
    found = token_logprobs(logits_KV[: len(tokens)], tokens, k)
    return list(zip(tokens, found, strict=True))
