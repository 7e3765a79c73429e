"""A small model drafts for a large one.

What. A second decoder with a KV cache of its own reads what the sequences know and goes on by
itself: one forward pass per drafted token, for all sequences of the step at once. What the verifier
refused is forgotten by going back to the longest head that both have in common.

Source. Speculative decoding (Leviathan et al. 2023; Chen et al. 2023).

Invariants. Requests that are greedy or have a seed get the draft model's likeliest tokens and are
walked, so that their answers are those of plain decoding. The others' drafts are *drawn*, after the
request's own temperature and restrictions, and verified by rejection (`draft_sample_method`
"greedy" drafts the likeliest for everybody). Both models speak the same tokens, compared by content
when the engine is assembled; ids that the target does not have are never drafted.
When it loses. T_draft / T_target is the price of a guess: with c = 0.2 and 60 % acceptance the gain
is gone at three drafts. On small targets the passes are overhead, not arithmetic.

Shapes: T rows of a pass, S sequences, V the target's vocabulary, Q the draft model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ridgeline.engine.attention.base import Attention
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.sampling.verify.verifier import Drawn
from ridgeline.engine.scheduler.kv.block_pool import BlockPool
from ridgeline.engine.scheduler.plan import Run
from ridgeline.engine.scheduler.speculation.base import DraftContext
from ridgeline.engine.speculate.drafters.sampling import (
    Guess,
    all_argmax,
    given,
    numbers_for,
    take,
    take_named,
)
from ridgeline.engine.speculate.drafters.target_model import last_hidden, last_tokens_of

CHUNK = 512  # rows of one pass while a prompt is being read


@dataclass(slots=True)
class _Reader:
    """What the draft model has computed of one sequence."""

    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Guess(Guess):
    """One sequence's draft in the making, and how far it has been read."""

    reader: _Reader


class DraftModelDrafter:
    """See the head of this file. `draws`: draw for requests without a seed. `vocab_size`: the
    target's."""

    name = "draft_model"

    def __init__(
        self,
        decoder: Decoder,
        attention: Attention,
        pool: BlockPool,
        *,
        drawn: Drawn,
        draws: bool,
        vocab_size: int,
    ) -> None:
        self._decoder, self._attention, self._pool = decoder, attention, pool
        self._drawn, self._draws, self._vocab_size = drawn, draws, vocab_size
        self._last_tokens = last_tokens_of(decoder, attention, vocab_size)
        self._readers: dict[int, _Reader] = {}

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
        return given(contexts, [guess for guess in guesses if guess is not None], self._drawn)

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        reader = self._readers.pop(seq_id, None)
        if reader is not None:
            self._pool.release_all(reader.blocks)

    def _begin(self, each: DraftContext, depth: int) -> _Guess | None:
        """Go back to what is still right, and find blocks for what is to come; None without."""
        reader = self._readers.setdefault(each.seq_id, _Reader())
        _go_back(reader.tokens, each.tokens)
        depth = min(depth, self._decoder.spec.max_positions - len(each.tokens))
        num_missing = self._pool.num_blocks_for(len(each.tokens) + depth) - len(reader.blocks)
        if depth <= 0 or num_missing > self._pool.num_idle:
            return None
        reader.blocks += [self._pool.allocate() for _ in range(num_missing)]
        own = numbers_for(each, depth, self._draws)
        return _Guess(each, depth, own, reader=reader)

    def _read(self, guesses: Sequence[_Guess]) -> None:
        """Feed all but the last known token, where more than that is new."""
        for guess in guesses:
            reader, tokens = guess.reader, guess.each.tokens
            while len(tokens) - len(reader.tokens) > CHUNK:
                start = len(reader.tokens)
                fed = tuple(tokens[start : start + CHUNK])
                self._hidden([Run(guess.each.seq_id, start, fed, tuple(reader.blocks), None)])
                reader.tokens += fed

    def _go_on(self, guesses: Sequence[_Guess]) -> None:
        """One pass: everybody's next token."""
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
    """Over the target's vocabulary, which may be padded differently: no chance for what is not in
    both."""
    missing = width - logits_SQ.shape[1]
    if missing > 0:
        return torch.nn.functional.pad(logits_SQ, (0, missing), value=-torch.inf)
    return logits_SQ[:, :width]


def _go_back(computed: list[int], known: Sequence[int]) -> None:
    """Forget what differs, and the last known token: its logits are wanted again."""
    num = min(len(computed), len(known) - 1)
    while computed[:num] != list(known[:num]):
        num = next(i for i in range(num) if computed[i] != known[i])
    del computed[num:]


def _run(guess: _Guess) -> Run:
    start = len(guess.reader.tokens)
    known = guess.each.tokens
    new = (*known[start:], *guess.drafts[max(0, start - len(known)) :])
    return Run(guess.each.seq_id, start, tuple(new), tuple(guess.reader.blocks), None)
