"""The whole choice of a greedy step: the head's product, and the first largest logit of each row.

What: where every row of a step (drafts have rows of their own) is greedy and asks for nothing else
of its logits, nobody needs them as a tensor. A packed head writes them into memory that is kept
from step to step (a new tensor of 64 rows and 128k tokens is 32 MB of pages that the system has to
clear), and one pass over it finds the tokens: two native calls and no operator of torch.

Invariant: the tokens of `reference.py`, ties and errors included.

When it loses: nowhere that it runs. Other heads, soft caps and devices take the usual way.

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

MOST_KEPT_BYTES = 32 << 20  # of logits; more of them have memory of their own


class ArgmaxHead(Protocol):
    """x_SC to one token per row. ArithmeticError where a row leaves no choice."""

    def __call__(self, x_SC: Tensor) -> list[int]: ...


class LogitsArgmax:
    """For any head and device. Of `num_tokens`, the first of the vocabulary."""

    def __init__(self, decoder: Decoder, num_tokens: int) -> None:
        self._decoder, self._num_tokens = decoder, num_tokens

    def __call__(self, x_SC: Tensor) -> list[int]:
        return first_largest(self._decoder.logits(x_SC)[:, : self._num_tokens])


class NativeArgmax:
    """For a packed float32 head without a soft cap. One step at a time. `num_tokens` as above."""

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
        """The same of rows one behind the other in memory."""
        logits_SV, threads = self._buffer(num_rows), torch.get_num_threads()
        at = logits_SV.data_ptr()  # the tensor is held until the choice is made
        self.head.multiply_rows(x, self._num_in, num_rows, at, threads)
        num = self._num_tokens
        tokens = _native.first_largest(at, self._width, num_rows, num, threads, self._isa)
        if -1 in tokens:
            raise no_token_error(tokens.index(-1))
        return tokens

    def _buffer(self, num_rows: int) -> Tensor:
        """Memory for so many rows of logits."""
        if num_rows <= len(self._logits_SV):
            return self._logits_SV
        logits_SV = torch.empty((num_rows, self._width))
        if logits_SV.nbytes <= MOST_KEPT_BYTES:
            self._logits_SV = logits_SV
        return logits_SV


def make_argmax_head(decoder: Decoder, most_tokens: int | None = None) -> ArgmaxHead:
    """The way of this decoder's head, among the first `most_tokens` of its vocabulary (None:
    all)."""
    head, num_tokens = decoder.lm_head, decoder.spec.vocab_size
    if most_tokens is not None:
        num_tokens = min(num_tokens, most_tokens)
    plain = decoder.spec.final_softcap is None
    if type(head) is PackedLinear and head.dtype == torch.float32 and plain:
        return NativeArgmax(head.native, num_tokens)
    return LogitsArgmax(decoder, num_tokens)
