"""Chooses the next token of an unfinished draft from a drafter's logits.

Greedy and seeded requests get the most likely tokens (they are verified by exact match, so no other
choice is accepted more often). Tokens of other requests are sampled with the request's temperature,
penalties and restrictions, from random numbers of this step, and the distribution they were sampled
from is kept for the verifier.

Shape suffixes: S drafts, V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from msgspec.structs import replace
from torch import Tensor

from ridgeline.engine.sampling import probabilities, sample
from ridgeline.engine.sampling.verify.rejection_sampling import (
    DRAFT,
    draw,
    draw_distinct,
    uniform_numbers,
)
from ridgeline.engine.sampling.verify.verifier import DraftDistributions
from ridgeline.engine.scheduler.plan import SamplePoint
from ridgeline.engine.scheduler.speculation.base import DraftContext


@dataclass(slots=True)
class PartialDraft:
    """One sequence's unfinished draft.

    `numbers`: one random number per token if sampled, else empty. `rows`: the distribution of each
    token. `is_argmax`: its tokens are the first largest logits.
    """

    context: DraftContext
    depth: int
    numbers: Sequence[float]
    drafts: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    is_argmax: bool = field(init=False)

    def __post_init__(self) -> None:
        sampling = self.context.sampling
        if sampling.temperature or sampling.logprobs is not None:
            sampling = replace(sampling, temperature=0.0, logprobs=None)
        self.is_argmax = not self.numbers and sampling.is_plain_greedy

    @property
    def is_done(self) -> bool:
        return len(self.drafts) >= self.depth

    @property
    def at(self) -> SamplePoint:
        """How the next token is to be sampled."""
        context, text = self.context, (*self.context.tokens, *self.drafts)
        history = text if context.sampling.has_penalties else ()
        sampling = context.sampling if self.numbers else replace(context.sampling, temperature=0.0)
        index = len(text) - context.num_prompt
        return SamplePoint(replace(sampling, logprobs=None), 0, index, context.num_prompt, history)


def numbers_for(context: DraftContext, depth: int, draws: bool) -> list[float]:
    """The random numbers consumed by a draft of `depth` tokens; empty if its tokens are not
    sampled.
    """
    if not draws or context.sampling.greedy or context.sampling.seed is not None:
        return []
    return uniform_numbers(context.seed, len(context.tokens) - context.num_prompt, depth, DRAFT)


def all_argmax(guesses: Sequence[PartialDraft]) -> bool:
    """Whether all drafts need only the first largest logit, so that `take_named` suffices."""
    return all(guess.is_argmax for guess in guesses)


def take_named(guesses: Sequence[PartialDraft], tokens: Sequence[int]) -> None:
    """Set the next token of every draft to the first largest of its logits."""
    for guess, token in zip(guesses, tokens, strict=True):
        guess.drafts.append(token)


def take(guesses: Sequence[PartialDraft], logits_SV: Tensor) -> None:
    """Choose the next token of every draft from its row."""
    certain = [i for i, guess in enumerate(guesses) if not guess.numbers]
    drawing = [i for i, guess in enumerate(guesses) if guess.numbers]
    if certain:
        at = [guesses[i].at for i in certain]
        for i, (token, _) in zip(certain, sample(logits_SV[certain], at), strict=True):
            guesses[i].drafts.append(token)
    if drawing:
        rows = probabilities(logits_SV[drawing], [guesses[i].at for i in drawing])
        for i, q_V in zip(drawing, rows, strict=True):
            guess = guesses[i]
            guess.drafts.append(draw(q_V, guess.numbers[len(guess.drafts)]))
            guess.rows.append(q_V)


def places_of(
    guess: PartialDraft, logits_KV: Tensor, widths: Sequence[int]
) -> tuple[list[list[int]], Tensor]:
    """Distinct tokens for every position of a tree, `widths[i]` at position i, and their
    distribution (or logits, if not sampled).
    """
    if not guess.numbers:
        best = logits_KV.topk(min(max(widths), logits_KV.shape[1])).indices.tolist()
        return [own[:width] for own, width in zip(best, widths, strict=True)], logits_KV
    q_KV, left = probabilities(logits_KV, [guess.at] * len(logits_KV)), iter(guess.numbers)
    draws = [
        draw_distinct(q_V, list(islice(left, width)))
        for q_V, width in zip(q_KV, widths, strict=True)
    ]
    return draws, q_KV


def finished_drafts(
    contexts: Sequence[DraftContext], guesses: Sequence[PartialDraft], drawn: DraftDistributions
) -> list[tuple[int, ...]]:
    """One draft per entry of `contexts`, with the distributions for the verifier."""
    for guess in guesses:
        if guess.rows:
            drawn.record(guess.context.seq_id, tuple(guess.drafts), torch.stack(guess.rows))
    found = {guess.context.seq_id: tuple(guess.drafts) for guess in guesses}
    return [found.get(context.seq_id, ()) for context in contexts]
