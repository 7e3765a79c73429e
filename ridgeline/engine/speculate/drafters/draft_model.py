"""A small model drafts for a large one.

A second decoder with its own KV cache reads the sequences' known tokens and continues: one forward
pass per drafted token, for all sequences of the step together. Rejected tokens are undone by going
back to the longest common prefix.

Source: speculative decoding (Leviathan et al. 2023; Chen et al. 2023).

Invariants: greedy and seeded requests get the draft model's most likely tokens and are verified by
exact match, so their output equals plain decoding. Drafts of other requests are sampled with the
request's temperature and restrictions and verified by rejection (`draft_sample_method` "greedy"
drafts the most likely tokens for all). Both models must have the same vocabulary, compared by
content when the engine is built; ids unknown to the target are never drafted. When it loses: a
draft costs T_draft / T_target; at a cost of 0.2 and 60 % acceptance the gain is gone at three
drafts. On small targets the passes are overhead rather than arithmetic.

Shape suffixes: T rows of a pass, S sequences, V the target's vocabulary, Q the draft model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ridgeline.engine.attention.base import Attention
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.sampling.verify.verifier import DraftDistributions
from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.plan import Run
from ridgeline.engine.scheduler.speculation.base import DraftContext
from ridgeline.engine.speculate.drafters.sampling import (
    PartialDraft,
    all_argmax,
    finished_drafts,
    numbers_for,
    take,
    take_named,
)
from ridgeline.engine.speculate.drafters.target_model import last_hidden, last_tokens_of

CHUNK = 512  # rows of one pass while a prompt is being read


@dataclass(slots=True)
class _ModelReader:
    """What the draft model has computed of one sequence."""

    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _ModelDraft(PartialDraft):
    """One sequence's unfinished draft, and how far it has been read."""

    reader: _ModelReader


class DraftModelDrafter:
    """Drafts with a second model. `draws`: sample for requests without a seed. `vocab_size`: the
    target's.
    """

    name = "draft_model"

    def __init__(
        self,
        decoder: Decoder,
        attention: Attention,
        pool: BlockPool,
        *,
        drawn: DraftDistributions,
        draws: bool,
        vocab_size: int,
    ) -> None:
        self._decoder, self._attention, self._pool = decoder, attention, pool
        self._drawn, self._draws, self._vocab_size = drawn, draws, vocab_size
        self._last_tokens = last_tokens_of(decoder, attention, vocab_size)
        self._readers: dict[int, _ModelReader] = {}

    @torch.inference_mode()
    def draft(
        self, contexts: Sequence[DraftContext], depths: Sequence[int]
    ) -> list[tuple[int, ...]]:
        self._drawn.clear()
        guesses = [self._begin(o, d) for o, d in zip(contexts, depths, strict=True) if d > 0]
        going = [guess for guess in guesses if guess is not None]
        self._read(going)
        while going:
            self._go_on(going)
            going = [guess for guess in going if not guess.is_done]
        return finished_drafts(
            contexts, [guess for guess in guesses if guess is not None], self._drawn
        )

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        reader = self._readers.pop(seq_id, None)
        if reader is not None:
            self._pool.release_all(reader.blocks)

    def _begin(self, context: DraftContext, depth: int) -> _ModelDraft | None:
        """Go back to the common prefix and allocate blocks; None if there are none."""
        reader = self._readers.setdefault(context.seq_id, _ModelReader())
        _go_back(reader.tokens, context.tokens)
        depth = min(depth, self._decoder.spec.max_positions - len(context.tokens))
        num_missing = self._pool.num_blocks_for(len(context.tokens) + depth) - len(reader.blocks)
        if depth <= 0 or num_missing > self._pool.num_idle:
            return None
        reader.blocks += [self._pool.allocate() for _ in range(num_missing)]
        own = numbers_for(context, depth, self._draws)
        return _ModelDraft(context, depth, own, reader=reader)

    def _read(self, guesses: Sequence[_ModelDraft]) -> None:
        """Feed all but the last known token, if more than that is new."""
        for guess in guesses:
            reader, tokens = guess.reader, guess.context.tokens
            while len(tokens) - len(reader.tokens) > CHUNK:
                start = len(reader.tokens)
                fed = tuple(tokens[start : start + CHUNK])
                self._hidden([Run(guess.context.seq_id, start, fed, tuple(reader.blocks), None)])
                reader.tokens += fed

    def _go_on(self, guesses: Sequence[_ModelDraft]) -> None:
        """One pass: the next token of every draft."""
        runs = [_run(guess) for guess in guesses]
        if all_argmax(guesses):
            take_named(guesses, self._last_tokens(runs))
        else:
            logits_SQ = self._decoder.logits(self._hidden(runs))
            take(guesses, _as_wide(logits_SQ, self._vocab_size))
        for guess, run in zip(guesses, runs, strict=True):
            guess.reader.tokens += run.tokens

    def _hidden(self, runs: Sequence[Run]) -> Tensor:
        """Hidden states of each run's last row."""
        return last_hidden(self._decoder, self._attention, runs)


def _as_wide(logits_SQ: Tensor, width: int) -> Tensor:
    """Logits over the target's vocabulary, which may be padded differently; -inf for ids not in
    both.
    """
    missing = width - logits_SQ.shape[1]
    if missing > 0:
        return torch.nn.functional.pad(logits_SQ, (0, missing), value=-torch.inf)
    return logits_SQ[:, :width]


def _go_back(computed: list[int], known: Sequence[int]) -> None:
    """Forget what differs, and the last known token, whose logits are needed again."""
    num = min(len(computed), len(known) - 1)
    while computed[:num] != list(known[:num]):
        num = next(i for i in range(num) if computed[i] != known[i])
    del computed[num:]


def _run(guess: _ModelDraft) -> Run:
    start = len(guess.reader.tokens)
    known = guess.context.tokens
    new = (*known[start:], *guess.drafts[max(0, start - len(known)) :])
    return Run(guess.context.seq_id, start, tuple(new), tuple(guess.reader.blocks), None)
