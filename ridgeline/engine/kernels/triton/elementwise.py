"""Functions of Triton kernels that several of them call: rounding to 8 bits, activations."""

from __future__ import annotations

import triton
import triton.language as tl

NO_CODES = tl.constexpr(0)
FP8_CODES = tl.constexpr(1)
INT8_CODES = tl.constexpr(2)
LARGEST_FP8 = tl.constexpr(448.0)
LARGEST_INT8 = tl.constexpr(127.0)
ROUNDING = tl.constexpr(12582912.0)  # 1.5 · 2^23: a float32 of this size has no fraction


@triton.jit
def row_scale(top, CODES: tl.constexpr):
    """The scale of rows whose largest magnitude is `top`: it maps to the largest code."""
    largest: tl.constexpr = LARGEST_FP8 if CODES == FP8_CODES else LARGEST_INT8
    return tl.where(top == 0, 1.0, top) / largest


@triton.jit
def encode(x, CODES: tl.constexpr):
    """Codes of float32 numbers in units of their scale: nearest, saturated."""
    if CODES == FP8_CODES:
        codes = tl.minimum(tl.maximum(x, -LARGEST_FP8), LARGEST_FP8).to(tl.float8e4nv)
    else:  # adding and subtracting rounds half to even, as torch.round does
        nearest = (x + ROUNDING) - ROUNDING
        codes = tl.minimum(tl.maximum(nearest, -LARGEST_INT8), LARGEST_INT8).to(tl.int8)
    return codes


@triton.jit
def silu(x):
    """x · sigmoid(x)."""
    return x / (1 + tl.exp2(-1.4426950408889634 * x))
