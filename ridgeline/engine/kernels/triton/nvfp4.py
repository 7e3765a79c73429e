"""NVFP4 weights widened in registers: E2M1 codes with an E4M3 scale per 16 inputs.

A code times its scale has at most six significant bits, so that the weight, but for the float32
scale of the tensor, is exact in bfloat16, float16 and float32. Scales are read as bytes and
converted with integer operations: cards before compute capability 8.9 have no E4M3.

Shape legend: T rows, I inputs, O outputs, G groups.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(16)


@triton.jit
def scale_of(byte):
    """The number of a positive E4M3 byte, float32, exactly."""
    bits = byte.to(tl.int32)
    exponent, mantissa = bits >> 3, (bits & 7).to(tl.float32)
    normal = ((exponent + 120) << 23).to(tl.float32, bitcast=True) * (1.0 + mantissa * 0.125)
    return tl.where(exponent == 0, mantissa * 0.001953125, normal)


@triton.jit
def twice_value_of(code):
    """Twice the number of an E2M1 code, float32: whole numbers up to 12."""
    bits = code.to(tl.int32)
    exponent, mantissa = (bits >> 1) & 3, bits & 1
    size = tl.where(exponent == 0, mantissa, (2 + mantissa) << tl.maximum(exponent - 1, 0))
    return tl.where(bits >= 8, -size, size).to(tl.float32)


@triton.jit
def _fold_half(
    acc, codes, x_at, scale, o, o_seen, t_seen, k, num_in, num_groups,
    HALF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + w x of the inputs k .. k + HALF - 1."""
    i = k + tl.arange(0, HALF)
    x = tl.load(x_at + i[None, :], mask=t_seen[:, None] & (i < num_in)[None, :], other=0.0)
    at = (o * num_groups)[:, None] + tl.minimum(i // GROUP, num_groups - 1)[None, :]
    s = scale_of(tl.load(scale + at, mask=o_seen[:, None], other=0))
    w = (twice_value_of(codes) * (0.5 * s)).to(x.dtype)
    return tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)


@triton.jit
def fold_nvfp4(
    acc, x_at, w, scale, o, o_seen, t_seen, k, num_in, w_stride, num_groups,
    BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + w x of the inputs k .. k + BK - 1, the second half of each 128 in the high nibbles."""
    HALF: tl.constexpr = BK // 2
    j = k // 2 + tl.arange(0, HALF)
    packed = tl.load(w + (o * w_stride)[:, None] + j[None, :], mask=o_seen[:, None], other=0)
    acc = _fold_half(
        acc, packed & 0xF, x_at, scale, o, o_seen, t_seen, k, num_in, num_groups, HALF, PRECISION
    )
    return _fold_half(
        acc, packed >> 4, x_at, scale, o, o_seen, t_seen, k + HALF, num_in, num_groups, HALF,
        PRECISION,
    )  # fmt: skip
