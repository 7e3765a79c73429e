"""Choosing the next token: the contract of the samplers.

A sampler turns the logits of S positions into one token each. The order of its stages is that of
vLLM V1:

    raw logits ─▶ log-softmax, if requested (first of all: "raw" log-probabilities)
               ─▶ + logit_bias ─▶ banned tokens, and those that would complete a bad word, to -inf;
                  where a token is forced, all others
               ─▶ repetition penalty over prompt and output (l / r where positive, else l · r)
               ─▶ - frequency_penalty · count - presence_penalty · (count > 0), over the output
    greedy     ─▶ argmax
    otherwise  ─▶ / temperature ─▶ min-p ─▶ top-k ─▶ top-p over what is left ─▶ inverse CDF

Invariants
- Tokens are ordered by (logit falling, token id rising). Greedy takes the first; top-k keeps
  exactly the first k; top-p keeps the shortest head whose mass reaches p (the token that crosses p
  is in); the rank of a token is its place in that order. So top_k=1 equals greedy, ties and all.
- min-p keeps tokens whose probability is at least min_p times that of the most likely one.
- A draw uses one uniform number of (seed, index) and walks the cumulative distribution in the
  order of token ids. Walking by id, not by probability, keeps near-ties from swapping places when
  the logits move by a rounding error: a draw flips only where the number falls within that error of
  a boundary.
- The result of a row depends on its own logits and SamplePoint alone, never on the other rows.
- Logits that leave no token to choose (NaN, +inf, everything banned) raise ArithmeticError with the
  row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ridgeline.engine.scheduler.plan import SamplePoint
from ridgeline.records import TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor

Choice = tuple[int, TokenLogprobs | None]
"""The token, and its raw log-probabilities if `sampling.logprobs` requested them."""


class Sampler(Protocol):
    """Chooses one token per row of logits_SV [S, V], in any float dtype, on any device."""

    def __call__(self, logits_SV: Tensor, points: Sequence[SamplePoint]) -> list[Choice]: ...
