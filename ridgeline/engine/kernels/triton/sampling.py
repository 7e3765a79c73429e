"""Choosing tokens in Triton: the argmax of rows of logits.

What. A first launch reduces parts of each row, a second the parts: one program per row would leave
most of the device idle when rows are few and vocabularies long.

Invariant. The lowest index of the largest value; -1 where a row holds NaN or its largest value is
not finite.

Shape legend: S rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 4096
NO_TOKEN = tl.constexpr(2147483647)


@triton.jit
def _largest_of_parts(x, top, index, stride, V, num_parts, PART: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    x = tl.load(x + row * stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)
    largest = tl.max(x, 0)
    tl.store(top + row * num_parts + part, largest)
    tl.store(index + row * num_parts + part, tl.min(tl.where(x == largest, at, NO_TOKEN), 0))


@triton.jit
def _largest_of_rows(top, index, out, num_parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    at = row * num_parts + part
    tops = tl.load(top + at, mask=part < num_parts, other=float("-inf"))
    tokens = tl.load(index + at, mask=part < num_parts, other=NO_TOKEN)
    largest = tl.max(tops, 0)
    token = tl.min(tl.where(tops == largest, tokens, NO_TOKEN), 0)
    is_finite = (largest < float("inf")) & (largest > float("-inf"))
    tl.store(out + row, tl.where(is_finite, token, -1))


def first_largest(logits_SV: Tensor) -> Tensor:
    """tokens_S (int32) of logits in a float dtype, whose rows may be strided."""
    num_rows, width = logits_SV.shape
    assert logits_SV.stride(1) == 1
    out_S = torch.empty(num_rows, dtype=torch.int32, device=logits_SV.device)
    if num_rows == 0:
        return out_S
    num_parts = triton.cdiv(width, PART)
    top = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits_SV.device)
    index = torch.empty((num_rows, num_parts), dtype=torch.int32, device=logits_SV.device)
    _largest_of_parts[(num_rows, num_parts)](
        *(logits_SV, top, index, logits_SV.stride(0), width, num_parts), PART=PART, num_warps=8
    )
    parts = triton.next_power_of_2(num_parts)
    _largest_of_rows[(num_rows,)](top, index, out_S, num_parts, PARTS=parts, num_warps=1)
    return out_S
