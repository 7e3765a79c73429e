"""Turns the logits of a step into tokens: one per run, or as many as its accepted drafts allow.

Drafts named with certainty, and all drafts of greedy or seeded requests, are verified by exact
match with sampled tokens, so the output is that of plain decoding. Drafts that were drawn at random
(the drafter records their distributions in `DraftDistributions`) are verified by rejection
sampling.

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
from ridgeline.engine.structured_output.base import needs_mask


class PathOutput(NamedTuple):
    """The accepted path of a draft tree, and its choices."""

    path: int
    choices: list[Choice]


RowObserver = Callable[[Run, Sequence[Choice]], None]
"""Called with a run and the model's choice at each of its rows."""


class DraftDistributions:
    """The distributions that drafts were drawn from, by sequence id.

    Written by the drafter and read by the verifier of the same step.
    """

    def __init__(self) -> None:
        self._rows: dict[int, tuple[tuple[int, ...], Tensor]] = {}
        self._trees: dict[int, TreeDraws] = {}

    def clear(self) -> None:
        """Forget everything: a new step begins."""
        self._rows.clear()
        self._trees.clear()

    def record(self, seq_id: int, drafts: tuple[int, ...], q_KV: Tensor) -> None:
        """The drafts of a sequence were drawn from `q_KV`."""
        self._rows[seq_id] = drafts, q_KV

    def record_tree(self, seq_id: int, tree: TreeDraws) -> None:
        """The draft tree of a sequence was drawn as `tree` says."""
        self._trees[seq_id] = tree

    def rows_of(self, run: Run) -> Tensor | None:
        """q_KV of the run's drafts, which may have been truncated; None if they were not drawn."""
        drafts, q_KV = self._rows.get(run.seq_id, ((), None))
        if q_KV is None or not run.num_drafts or drafts[: run.num_drafts] != run.drafts:
            return None
        return q_KV[: run.num_drafts]

    def tree_of(self, run: Run) -> TreeDraws | None:
        """The draws of the run's draft tree; None if it was not drawn."""
        return self._trees.get(run.seq_id) if run.num_drafts else None


class Verifier:
    """Samples tokens and verifies drafts.

    `method` is the rejection rule for drawn drafts, "standard" or "block". `row_observer` is called
    with the model's choices at every row of runs that are verified by exact match.
    """

    def __init__(
        self,
        method: str = "block",
        drawn: DraftDistributions | None = None,
        row_observer: RowObserver | None = None,
    ) -> None:
        self._rule, self._drawn = RULES[method], drawn or DraftDistributions()
        self._row_observer = row_observer

    @property
    def has_row_observer(self) -> bool:
        return self._row_observer is not None

    def accept_argmax(self, tokens: Sequence[int], runs: Sequence[Run]) -> list[tuple[int, ...]]:
        """The output of each run, given the argmax token of every row."""
        if len(tokens) == len(runs) and not self.has_row_observer:
            return [(token,) for token in tokens]
        self._observe([(token, None) for token in tokens], runs)
        rest = iter(tokens)
        outputs = []
        for run in runs:
            own = list(islice(rest, run.max_outputs))
            outputs.append(tuple(own[: count_matching(run.drafts, own) + 1]))
        return outputs

    def accept_argmax_trees(self, tokens: Sequence[int], runs: Sequence[Run]) -> list[PathOutput]:
        """Like `accept_argmax` for runs with branches; rows are those of all paths in order."""
        rest = iter(tokens)
        return [
            walk_tree([[(next(rest), None) for _ in range(p.max_outputs)] for p in paths], paths)
            for paths in map(draft_paths, runs)
        ]

    def accept(
        self, logits_SV: Tensor, runs: Sequence[Run], points: Sequence[SamplePoint]
    ) -> list[list[Choice]]:
        """The choices of each run; `max_outputs` rows (and points) belong to each run in order."""
        if not any(run.num_drafts for run in runs) and self._row_observer is None:
            rest = iter(sample(logits_SV, points))
            return [[next(rest)] if run.sample is not None else [] for run in runs]
        drawn = {i: q for i, run in enumerate(runs) if (q := self._drawn.rows_of(run)) is not None}
        if not drawn:
            return _match_drafts(self._observe(sample(logits_SV, points), runs), runs)
        ends = accumulate(run.max_outputs for run in runs)
        rows = [range(end - run.max_outputs, end) for run, end in zip(runs, ends, strict=True)]
        matched_rows = [row for i, own in enumerate(rows) if i not in drawn for row in own]
        sampled: list[Choice] = []
        if matched_rows:
            sampled = sample(logits_SV[matched_rows], [points[row] for row in matched_rows])
        matched_runs = [runs[i] for i in range(len(runs)) if i not in drawn]
        matched = iter(_match_drafts(sampled, matched_runs))
        return [
            self._reject(
                logits_SV[own.start : own.stop], run, [points[row] for row in own], drawn[i]
            )
            if i in drawn
            else next(matched)
            for i, (run, own) in enumerate(zip(runs, rows, strict=True))
        ]

    def accept_trees(
        self, logits_SV: Tensor, runs: Sequence[Run], points: Sequence[SamplePoint]
    ) -> list[PathOutput]:
        """Like `accept` for runs with branches; rows are those of all paths in order."""
        paths = [draft_paths(run) for run in runs]
        drawn = [self._drawn.tree_of(run) for run in runs]
        ends = accumulate(path.max_outputs for own in paths for path in own)
        rest = (range(e - p.max_outputs, e) for e, p in zip(ends, chain(*paths), strict=True))
        rows = [list(islice(rest, len(own))) for own in paths]
        matched_rows = [
            row
            for tree, own in zip(drawn, rows, strict=True)
            if tree is None
            for path_rows in own
            for row in path_rows
        ]
        sampled = sample(logits_SV[matched_rows], [points[row] for row in matched_rows])
        choice_of = dict(zip(matched_rows, sampled, strict=True))
        return [
            walk_tree([[choice_of[row] for row in path_rows] for path_rows in own_rows], own_paths)
            if tree is None
            else self._reject_tree(logits_SV, own_paths, own_rows, points, tree)
            for own_paths, own_rows, tree in zip(paths, rows, drawn, strict=True)
        ]

    def _observe(self, choices: list[Choice], runs: Sequence[Run]) -> list[Choice]:
        if self._row_observer is not None:
            rest = iter(choices)
            for run in runs:
                if run.max_outputs:
                    self._row_observer(run, list(islice(rest, run.max_outputs)))
        return choices

    def _reject(
        self, logits_KV: Tensor, run: Run, points: Sequence[SamplePoint], q_KV: Tensor
    ) -> list[Choice]:
        """Verify a drawn draft by rejection sampling."""
        p_KV = probabilities(logits_KV, points)
        first = points[0]
        tokens = verify_draft(self._rule, p_KV, q_KV, run.drafts, first.seed, first.index)
        return _with_logprobs(logits_KV, first, tokens)

    def _reject_tree(
        self,
        logits_SV: Tensor,
        paths: Sequence[Run],
        rows: Sequence[range],
        points: Sequence[SamplePoint],
        tree: TreeDraws,
    ) -> PathOutput:
        """Verify a drawn draft tree by rejection sampling."""
        leaves = [ranks_of(path.drafts, tree) for path in paths]

        def path_through(node: TreePath) -> int:
            return next(i for i, leaf in enumerate(leaves) if leaf[: len(node)] == node)

        def p_of(node: TreePath) -> Tensor:
            row = rows[path_through(node)][len(node)]
            return probabilities(logits_SV[row : row + 1], [points[row]])[0]

        first = points[rows[0][0]]
        numbers = uniform_numbers(first.seed, first.index, sum(len(own) for own in tree.draws))
        node, weight_V = accept_tree(leaves, p_of, tree, numbers)
        last = draw(weight_V, uniform(first.seed, first.index + len(node)))
        tokens, own = [*tree.tokens_of(node), last], rows[path_through(node)]
        logits_KV = logits_SV[own.start : own.start + len(tokens)]
        return PathOutput(path_through(node), _with_logprobs(logits_KV, first, tokens))


def with_raw_logprobs(
    choices: Sequence[list[Choice]],
    raw_SV: Tensor,
    runs: Sequence[Run],
    points: Sequence[SamplePoint],
) -> list[list[Choice]]:
    """The runs' choices with log-probabilities of the unmasked logits `raw_SV`.

    Runs without a mask keep their log-probabilities bit for bit.
    """
    firsts = accumulate((run.max_outputs for run in runs), initial=0)
    return [
        _with_raw_logprobs(own, raw_SV, first, points)
        for own, first in zip(choices, firsts, strict=False)
    ]


def with_raw_logprobs_of_trees(
    accepted: Sequence[PathOutput],
    raw_SV: Tensor,
    paths: Sequence[Sequence[Run]],
    points: Sequence[SamplePoint],
) -> list[PathOutput]:
    """Like `with_raw_logprobs`; `paths` are those of each run, whose rows are in order."""
    firsts = list(accumulate((path.max_outputs for path in chain(*paths)), initial=0))
    starts = accumulate((len(own) for own in paths), initial=0)
    return [
        PathOutput(
            own.path, _with_raw_logprobs(own.choices, raw_SV, firsts[start + own.path], points)
        )
        for own, start in zip(accepted, starts, strict=False)
    ]


def _with_raw_logprobs(
    choices: list[Choice], raw_SV: Tensor, first: int, points: Sequence[SamplePoint]
) -> list[Choice]:
    if not choices or not needs_mask(points[first : first + 1]):
        return choices
    raw_KV = raw_SV[first : first + len(choices)]
    return _with_logprobs(raw_KV, points[first], [token for token, _ in choices])


def walk_tree(rows: Sequence[Sequence[Choice]], paths: Sequence[Run]) -> PathOutput:
    """Follow a draft tree while some path agrees with the model.

    `rows[i]` are the model's choices along path i.
    """
    if not paths[0].max_outputs:
        return PathOutput(0, [])
    alive, choices = list(range(len(paths))), [rows[0][0]]
    while True:
        position, token = len(choices) - 1, choices[-1][0]
        agreeing = [i for i in alive if paths[i].drafts[position : position + 1] == (token,)]
        if not agreeing:
            return PathOutput(alive[0], choices)
        alive = agreeing
        choices.append(rows[alive[0]][position + 1])


def ranks_of(drafts: Sequence[int], tree: TreeDraws) -> TreePath:
    """The rank of each draft of a chain among the candidates of its position."""
    return tuple(own.index(token) for own, token in zip(tree.draws, drafts, strict=False))


def _match_drafts(choices: Sequence[Choice], runs: Sequence[Run]) -> list[list[Choice]]:
    rest = iter(choices)
    return [accept_matching(run.drafts, list(islice(rest, run.max_outputs))) for run in runs]


def _with_logprobs(logits_KV: Tensor, point: SamplePoint, tokens: Sequence[int]) -> list[Choice]:
    k = point.sampling.logprobs
    if k is None:
        return [(token, None) for token in tokens]
    logprobs = token_logprobs(logits_KV[: len(tokens)], tokens, k)
    return list(zip(tokens, logprobs, strict=True))
