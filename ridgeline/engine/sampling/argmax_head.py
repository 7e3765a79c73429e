"""LM head and argmax of a greedy step: the product, and the first largest logit of each row.

What. If every row of a step (drafts included) is greedy and needs nothing else from its logits,
they are not needed as a tensor. A packed head writes them into memory that is reused from step to
step (a new tensor of 64 rows and 128k tokens is 32 MB of pages that the operating system has to
clear), and one pass finds the tokens: two native calls and no torch operator.

Invariant. The tokens of `reference.py`, ties and errors included.

When it loses. Nowhere that it runs. Other heads, soft caps and devices go through logits.

Shape legend: S rows, C hidden_size, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

import ridgeline._native as _native
from ridgeline.engine.kernels.native_linear import NativeLinear, isa
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.quant.packed import PackedLinear
from ridgeline.engine.sampling import first_largest
from ridgeline.engine.sampling.batched import no_token_error

MAX_REUSED_BYTES = 32 << 20  # larger logits are allocated for each step


class ArgmaxHead(Protocol):
    """Maps x_SC to one token per row. Raises ArithmeticError if a largest logit is not finite."""

    def __call__(self, x_SC: Tensor) -> list[int]: ...


class LogitsArgmax:
    """For any head and device; considers the first `num_tokens` of the vocabulary."""

    def __init__(self, decoder: Decoder, num_tokens: int) -> None:
        self._decoder, self._num_tokens = decoder, num_tokens

    def __call__(self, x_SC: Tensor) -> list[int]:
        return first_largest(self._decoder.logits(x_SC)[:, : self._num_tokens])


class NativeArgmax:
    """For a packed float32 head without a soft cap. One step at a time.

    Considers the first `num_tokens` of the vocabulary.
    """

    def __init__(self, head: NativeLinear, num_tokens: int) -> None:
        self.head, self._isa = head, isa()
        self._num_in, self._width = head.packed.num_in, head.packed.num_out
        self._num_tokens = num_tokens
        self._logits_SV = torch.empty((0, self._width))

    def __call__(self, x_SC: Tensor) -> list[int]:
        x_SC = x_SC.contiguous()
        assert x_SC.dtype == torch.float32 and x_SC.shape[1] == self._num_in
        return self.from_memory(x_SC.data_ptr(), len(x_SC))

    def from_memory(self, x: int, num_rows: int) -> list[int]:
        """The tokens of `num_rows` contiguous rows at address `x`."""
        logits_SV, threads = self._buffer(num_rows), torch.get_num_threads()
        at = logits_SV.data_ptr()  # `logits_SV` keeps the memory alive until the tokens are found
        self.head.multiply_rows(x, self._num_in, num_rows, at, threads)
        num = self._num_tokens
        tokens = _native.first_largest(at, self._width, num_rows, num, threads, self._isa)
        if -1 in tokens:
            raise no_token_error(tokens.index(-1))
        return tokens

    def _buffer(self, num_rows: int) -> Tensor:
        """Memory for at least `num_rows` rows of logits."""
        if num_rows <= len(self._logits_SV):
            return self._logits_SV
        logits_SV = torch.empty((num_rows, self._width))
        if logits_SV.nbytes <= MAX_REUSED_BYTES:
            self._logits_SV = logits_SV
        return logits_SV


def make_argmax_head(decoder: Decoder, max_tokens: int | None = None) -> ArgmaxHead:
    """The fastest head for this decoder, over the first `max_tokens` token ids (None: all)."""
    head, num_tokens = decoder.lm_head, decoder.spec.vocab_size
    if max_tokens is not None:
        num_tokens = min(num_tokens, max_tokens)
    plain = decoder.spec.final_softcap is None and decoder.spec.logit_scale == 1.0
    if type(head) is PackedLinear and head.dtype == torch.float32 and plain:
        return NativeArgmax(head.native, num_tokens)
    return LogitsArgmax(decoder, num_tokens)
