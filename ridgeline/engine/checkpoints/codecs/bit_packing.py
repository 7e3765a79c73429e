"""Unpacks integers from 32-bit words, low bits first, and packs them.

A row of words is one bit stream: number i has bits i·b … i·b + b - 1. If b divides 32 no number
crosses a word; 3, 5, 6 and 7 bits do. `wasteful` is the older layout of compressed-tensors: 32 // b
numbers per word, remaining bits unused.

Shape suffixes: R rows, W words, N numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor


def unpack(words_RW: Tensor, bits: int, count: int, *, wasteful: bool = False) -> Tensor:
    """The first `count` numbers of every row, uint8 [R, N]."""
    words_RW = words_RW.clone(memory_format=torch.contiguous_format)  # one column: any stride
    words_RW = words_RW.as_strided(words_RW.shape, (words_RW.shape[1], 1))
    if bits == 8:
        return words_RW.view(torch.uint8)[:, :count]
    if bits in (2, 4):
        bytes_RB = words_RW.view(torch.uint8)
        pieces = [(bytes_RB >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
        return torch.stack(pieces, -1).flatten(1)[:, :count].contiguous()
    if wasteful:
        shifts_J = torch.arange(32 // bits) * bits
        wide_RW1 = (words_RW.long() & 0xFFFFFFFF).unsqueeze(2)
        numbers: Tensor = (wide_RW1 >> shifts_J) & (2**bits - 1)
        return numbers.flatten(1)[:, :count].to(torch.uint8)
    return _stream(words_RW, bits, count)


def _stream(words_RW: Tensor, bits: int, count: int) -> Tensor:
    at_N = torch.arange(count) * bits
    word_N, shift_N = at_N // 32, at_N % 32
    wide_RW = words_RW.long() & 0xFFFFFFFF
    next_RW = torch.cat([wide_RW[:, 1:], wide_RW.new_zeros(len(wide_RW), 1)], 1)
    both_RN = wide_RW[:, word_N] | (next_RW[:, word_N] << 32)
    numbers_RN: Tensor = (both_RN >> shift_N) & (2**bits - 1)
    return numbers_RN.to(torch.uint8)


def num_words(bits: int, count: int, *, wasteful: bool = False) -> int:
    """Words of a row of `count` numbers."""
    return -(-count // (32 // bits)) if wasteful else -(-count * bits // 32)


def pack_words(numbers_RN: Tensor, bits: int) -> Tensor:
    """Rows of numbers as int32 words [R, W], densely packed."""
    num_rows, count = numbers_RN.shape
    width = num_words(bits, count)
    if bits in (1, 2, 4, 8):
        return _whole_bytes(numbers_RN, bits, width)
    bits_RNB = (numbers_RN.unsqueeze(2) >> torch.arange(bits, dtype=torch.uint8)) & 1
    flat = torch.nn.functional.pad(bits_RNB.flatten(1), (0, width * 32 - count * bits))
    weights = 1 << torch.arange(32)
    words_RW = (flat.view(num_rows, width, 32).long() * weights).sum(2)
    return torch.where(words_RW >= 2**31, words_RW - 2**32, words_RW).to(torch.int32)


def _whole_bytes(numbers_RN: Tensor, bits: int, width: int) -> Tensor:
    """Like `_stream` if no number crosses a byte: 1/8 of the memory, 1/20 of the time."""
    per_byte = 8 // bits
    room = torch.nn.functional.pad(numbers_RN, (0, width * 4 * per_byte - numbers_RN.shape[1]))
    # a single row may come with any stride, and words want it whole
    bytes_RB = room[:, ::per_byte].clone(memory_format=torch.contiguous_format)
    for place in range(1, per_byte):
        bytes_RB |= room[:, place::per_byte] << (place * bits)
    return bytes_RB.view(torch.int32)
