"""Which tokens the rows of a step may take, as one bit per token, and the logits of the others.

A row's words are 32 KB for 262,144 tokens. As bytes they would be 256 KB, which are written, read,
compared and read again: 0.7 ms for each row, ten times as much as applying the bits.

Bit t % 32 of word t // 32 stands for token t, as in llguidance. Shapes: S rows of logits, R rows
that have bits, V vocabulary, W words of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

import ridgeline._native as _native

if TYPE_CHECKING:
    from torch import Tensor

WORD_BITS = 32
ROWS_AT_ONCE = 64  # whose bits are widened together where no native code runs


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // WORD_BITS)


def new_words(num_rows: int, vocab_size: int) -> Tensor:
    """int32 [R, W] without content."""
    return torch.empty((num_rows, num_words(vocab_size)), dtype=torch.int32)


def allow_only(words_W: Tensor, tokens: Iterable[int]) -> None:
    """Set the bits of `tokens` and clear all others."""
    bits = words_W.zero_().numpy().view("uint32")
    for token in tokens:
        bits[token // WORD_BITS] |= 1 << token % WORD_BITS


def is_allowed(words_W: Tensor, token: int) -> bool:
    return bool(int(words_W[token // WORD_BITS]) >> token % WORD_BITS & 1)


def forbid(logits_SV: Tensor, rows: Sequence[int], words_RW: Tensor) -> None:
    """Set the logits of `rows` to -inf in place where a token's bit is 0.

    The first rows of `words_RW` are theirs, in this order; it may have more.
    """
    if not rows:
        return
    has_floats = logits_SV.device.type == "cpu" and logits_SV.dtype == torch.float32
    if not has_floats or logits_SV.stride(1) != 1:
        forbid_widened(logits_SV, rows, words_RW)
        return
    _native.forbid(
        logits_SV.data_ptr(),
        logits_SV.stride(0),
        logits_SV.shape[1],
        list(rows),
        words_RW.data_ptr(),
        words_RW.shape[1],
        torch.get_num_threads(),
    )


def forbid_widened(logits_SV: Tensor, rows: Sequence[int], words_RW: Tensor) -> None:
    """As `forbid`, for any device and dtype; the bits are copied to the device at once."""
    device, width = logits_SV.device, logits_SV.shape[1]
    rows_R = torch.tensor(rows, device=device)
    bytes_RB = words_RW[: len(rows)].contiguous().view(torch.uint8).to(device)
    shift_8 = torch.arange(8, dtype=torch.uint8, device=device)
    for at in range(0, len(rows), ROWS_AT_ONCE):
        bits_RB8 = bytes_RB[at : at + ROWS_AT_ONCE, :, None] >> shift_8 & 1
        forbidden_RV = bits_RB8.flatten(1)[:, :width] == 0
        some_R = rows_R[at : at + ROWS_AT_ONCE]
        logits_SV[some_R] = logits_SV[some_R].masked_fill(forbidden_RV, -torch.inf)
