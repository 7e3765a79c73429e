"""Chooses a token of a structured answer: random among those that the grammar permits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from ridgeline.engine.scheduler.plan import SamplePoint
from ridgeline.engine.structured_output.base import TokenMasks
from ridgeline.engine.tokenization import Tokenizer
from ridgeline.twin.synthetic_model import MAX_VOCABULARY, mix

_QUOTES = (b'"', b'"}', b'"]', b'",', b'":')
_BRACKETS = (b"}", b"]", b"}}", b" }", b" ]")


class MaskedChoice:
    """Draws among the permitted tokens.

    An end-of-sequence token in `ends` is taken as soon as the grammar allows it. Tokens that end a
    part of the answer (quotes, brackets) are preferred, and whitespace is avoided, so that answers
    in an unbounded grammar end.
    """

    def __init__(
        self, masks: TokenMasks, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]
    ) -> None:
        self._masks, self._tokenizer, self._vocab_size = masks, tokenizer, vocab_size
        self._ends = list(ends)

    @cached_property
    def _kinds(self) -> tuple[list[int], list[int], list[int]]:
        """Quotes, brackets and blanks: with the first structured answer, since it takes a while."""
        texts = list(map(self._tokenizer.bytes_of, range(min(self._vocab_size, MAX_VOCABULARY))))
        return (
            [token for token, text in enumerate(texts) if text in _QUOTES],
            [token for token, text in enumerate(texts) if text in _BRACKETS],
            [token for token, text in enumerate(texts) if text.isspace()],
        )

    def choose(self, point: SamplePoint) -> int:
        """The token; the same for the same point. ArithmeticError if none is permitted."""
        generator = torch.Generator().manual_seed(mix(point.seed, point.index) >> 1)
        logits_SV = torch.rand((1, self._vocab_size), generator=generator)
        quotes, brackets, blanks = self._kinds
        logits_SV[0, brackets] *= 4.0
        logits_SV[0, quotes] *= 8.0  # in a string, a bracket would not end anything
        logits_SV[0, blanks] -= 1.0
        logits_SV[0, self._ends] = -1e9 if point.banned else 10.0
        masked_SV = self._masks.apply(logits_SV, [point])
        token = int(masked_SV[0].argmax())
        if float(masked_SV[0, token]) == -torch.inf:
            raise ArithmeticError("no token is permitted here")
        return token
