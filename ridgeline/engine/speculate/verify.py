"""What the runner does with the logits of a step: one token per run, or as many as its draft earns.

Drafts named with certainty, and every draft of a request that is greedy or has a seed, are walked
(`walk.py`): the tokens are those of plain decoding. Drafts that were drawn (the drafter notes their
distributions in `Drawn`) are verified by rejection (`rejection.py`).

Shapes: S rows, K drafts of a run, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, islice

from torch import Tensor

from ridgeline.engine.core.plan import Run, SampleAt
from ridgeline.engine.sampling import probabilities, sample, token_logprobs
from ridgeline.engine.sampling.base import Choice
from ridgeline.engine.speculate.rejection import RULES, verified
from ridgeline.engine.speculate.walk import confirmed, num_confirmed

Witness = Callable[[Run, Sequence[Choice]], None]


class Drawn:
    """What drafts were drawn from, by sequence: a drafter writes it, the verifier of the same step
    reads it."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[tuple[int, ...], Tensor]] = {}

    def clear(self) -> None:
        self._rows.clear()

    def note(self, seq_id: int, drafts: tuple[int, ...], q_KV: Tensor) -> None:
        self._rows[seq_id] = drafts, q_KV

    def of(self, run: Run) -> Tensor | None:
        """q_KV of the run's drafts (they may have been cut short); None if they were not drawn."""
        drafts, q_KV = self._rows.get(run.seq_id, ((), None))
        if q_KV is None or not run.num_drafts or drafts[: run.num_drafts] != run.drafts:
            return None
        return q_KV[: run.num_drafts]


class Verifier:
    """`method`: the rule by which drawn drafts are judged. `witness` is told what the model says at
    every row of walked runs."""

    def __init__(
        self, method: str = "block", drawn: Drawn | None = None, witness: Witness | None = None
    ) -> None:
        self._rule, self._drawn, self._witness = RULES[method], drawn or Drawn(), witness

    @property
    def is_witnessed(self) -> bool:
        """Whether somebody is told what the model says at every row."""
        return self._witness is not None

    def named(self, tokens: Sequence[int], runs: Sequence[Run]) -> list[tuple[int, ...]]:
        """What each run gives where the model names one token at each of its rows."""
        if len(tokens) == len(runs) and not self.is_witnessed:
            return [(token,) for token in tokens]
        self._shown([(token, None) for token in tokens], runs)
        left = iter(tokens)
        return [_head(run.drafts, list(islice(left, run.num_given))) for run in runs]

    def choices(
        self, logits_SV: Tensor, runs: Sequence[Run], at: Sequence[SampleAt]
    ) -> list[list[Choice]]:
        """What each run gives; rows (and `at`) belong to runs in order, `num_given` each."""
        if not any(run.num_drafts for run in runs) and self._witness is None:
            return _plain(sample(logits_SV, at), runs)
        drawn = {i: q for i, run in enumerate(runs) if (q := self._drawn.of(run)) is not None}
        if not drawn:
            return _walked(self._shown(sample(logits_SV, at), runs), runs)
        ends = accumulate(run.num_given for run in runs)
        rows = [range(end - run.num_given, end) for run, end in zip(runs, ends, strict=True)]
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
        if self._witness is not None:
            left = iter(chosen)
            for run in runs:
                if run.num_given:
                    self._witness(run, list(islice(left, run.num_given)))
        return chosen

    def _judged(
        self, logits_KV: Tensor, run: Run, at: Sequence[SampleAt], q_KV: Tensor
    ) -> list[Choice]:
        p_KV = probabilities(logits_KV, at)
        tokens = verified(self._rule, p_KV, q_KV, run.drafts, at[0].seed, at[0].index)
        return _with_logprobs(logits_KV, at[0], tokens)


def _plain(chosen: Sequence[Choice], runs: Sequence[Run]) -> list[list[Choice]]:
    """No run carries drafts."""
    left = iter(chosen)
    return [[next(left)] if run.sample is not None else [] for run in runs]


def _walked(chosen: Sequence[Choice], runs: Sequence[Run]) -> list[list[Choice]]:
    left = iter(chosen)
    return [confirmed(run.drafts, list(islice(left, run.num_given))) for run in runs]


def _head(drafts: Sequence[int], named: Sequence[int]) -> tuple[int, ...]:
    return tuple(named[: num_confirmed(drafts, named) + 1])


def _with_logprobs(logits_KV: Tensor, at: SampleAt, tokens: Sequence[int]) -> list[Choice]:
    k = at.sampling.logprobs
    if k is None:
        return [(token, None) for token in tokens]
    found = token_logprobs(logits_KV[: len(tokens)], tokens, k)
    return list(zip(tokens, found, strict=True))
