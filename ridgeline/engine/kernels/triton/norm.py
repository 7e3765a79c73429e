"""Row-wise operators fused in Triton: RMSNorm with residual and quantisation, SiLU · mul.

What. A program holds one row in registers: it is read once and written once, where torch's
operators pass over memory for the sum, the norm, the row's largest magnitude and the codes. At the
sizes of a decode step the launches themselves are the cost, and fusion divides their number.

Invariants. Arithmetic is float32 whatever the dtype of the rows. The sum of a residual is rounded
to the rows' dtype before it is normalised, as without fusion. Codes are x / scale with scale =
max|x| / 448 (FP8 E4M3) or / 127 (INT8, half to even), per row.

When it loses. Rows longer than 65,536 do not fit (no model has them).

Shape legend: T rows, C and I their numbers.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.engine.kernels.triton.elementwise import (
    FP8_CODES,
    INT8_CODES,
    NO_CODES,
    encode,
    row_scale,
    silu,
)

Kind = Literal["int8", "fp8"]
CODES_OF: dict[Kind, int] = {"int8": INT8_CODES.value, "fp8": FP8_CODES.value}
LONGEST_ROW = 65536
CODE_DTYPES = {FP8_CODES.value: torch.float8_e4m3fn, INT8_CODES.value: torch.int8}


@triton.jit
def _store_row(x, out, scale_out, row, at, C: tl.constexpr, CODES: tl.constexpr):
    """Store one float32 row as it is, or as codes and their scale."""
    if CODES == NO_CODES:
        tl.store(out + at, x.to(out.dtype.element_ty), mask=at < C)
    else:
        scale = row_scale(tl.max(tl.abs(x), 0), CODES)
        tl.store(out + at, encode(x / scale, CODES), mask=at < C)
        tl.store(scale_out + row, scale)


@triton.jit
def _norm_rows(
    x_ptr, y_ptr, gain, sum_out, out, scale_out, x_stride, y_stride, eps,
    C: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + at, mask=at < C, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y = tl.load(y_ptr + row * y_stride + at, mask=at < C, other=0.0).to(tl.float32)
        rounded = (x + y).to(sum_out.dtype.element_ty)
        tl.store(sum_out + row * C + at, rounded, mask=at < C)
        x = rounded.to(tl.float32)
    if HAS_NORM:
        x = x / tl.sqrt(tl.sum(x * x, 0) / C + eps)
        x = x * tl.load(gain + at, mask=at < C, other=0.0).to(tl.float32)
    _store_row(x, out + row * C, scale_out, row, at, C, CODES)


@triton.jit
def _silu_mul_row(
    x_ptr, out, scale_out, stride, C: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * stride + at, mask=at < C, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride + C + at, mask=at < C, other=0.0).to(tl.float32)
    _store_row(silu(gate) * up, out + row * C, scale_out, row, at, C, CODES)


@triton.jit
def _scale_rows(
    sums, row_scale, scale, bias, out,
    C: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(sums + row * C + at, mask=at < C, other=0).to(tl.float32)
    x = x * tl.load(scale + at, mask=at < C, other=0.0) * tl.load(row_scale + row)
    if HAS_BIAS:
        x += tl.load(bias + at, mask=at < C, other=0.0).to(tl.float32)
    tl.store(out + row * C + at, x.to(out.dtype.element_ty), mask=at < C)


def scaled_rows(
    sums_TO: Tensor,
    scale_T1: Tensor,
    scale_O: Tensor,
    bias_O: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """sums · scale_T · scale_O (+ bias) of contiguous int32 or float32 sums, in one pass."""
    num_rows, width = sums_TO.shape
    out_TO = torch.empty((num_rows, width), dtype=out_dtype, device=sums_TO.device)
    block = min(1024, triton.next_power_of_2(width))
    if num_rows:
        _scale_rows[(num_rows, triton.cdiv(width, block))](
            *(sums_TO, scale_T1, scale_O, bias_O, out_TO),
            C=width,
            BLOCK=block,
            HAS_BIAS=bias_O is not None,
        )
    return out_TO


def rms_norm(x_TC: Tensor, gain_C: Tensor, eps: float) -> Tensor:
    """x / rms(x) · gain in the dtype of x."""
    _, normed, _ = _launch(x_TC, None, gain_C, eps, NO_CODES.value)
    return normed


def add_rms_norm(x_TC: Tensor, y_TC: Tensor, gain_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y, and its norm."""
    total, normed, _ = _launch(x_TC, y_TC, gain_C, eps, NO_CODES.value)
    return total, normed


def rms_norm_q(x_TC: Tensor, gain_C: Tensor, eps: float, kind: Kind) -> tuple[Tensor, Tensor]:
    """The norm as codes and scale_T1."""
    _, codes, scale_T1 = _launch(x_TC, None, gain_C, eps, CODES_OF[kind])
    return codes, scale_T1


def add_rms_norm_q(
    x_TC: Tensor, y_TC: Tensor, gain_C: Tensor, eps: float, kind: Kind
) -> tuple[Tensor, Tensor, Tensor]:
    """x + y, and its norm as codes and scale_T1."""
    return _launch(x_TC, y_TC, gain_C, eps, CODES_OF[kind])


def quantise_rows(x_TC: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Codes and scale_T1 of rows."""
    _, codes, scale_T1 = _launch(x_TC, None, None, 0.0, CODES_OF[kind])
    return codes, scale_T1


def silu_mul(x_T2I: Tensor) -> Tensor:
    """silu(gate) · up of rows that hold the gate's I numbers before the I of up."""
    num_rows, width = x_T2I.shape[0], x_T2I.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=x_T2I.dtype, device=x_T2I.device)
    block = min(1024, triton.next_power_of_2(width))
    if num_rows:
        grid = (num_rows, triton.cdiv(width, block))
        _silu_mul_row[grid](
            x_T2I,
            out,
            None,
            x_T2I.stride(0),
            C=width,
            BLOCK=block,
            CODES=NO_CODES.value,
            num_warps=4,
        )
    return out


def silu_mul_q(x_T2I: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """silu(gate) · up as codes and scale_T1."""
    codes = CODES_OF[kind]
    num_rows, width = x_T2I.shape[0], x_T2I.shape[1] // 2
    out, scale_T1 = _codes_of(x_T2I, num_rows, width, codes)
    block = _block(width)
    if num_rows:
        _silu_mul_row[(num_rows, 1)](
            *(x_T2I, out, scale_T1, x_T2I.stride(0)),
            C=width,
            BLOCK=block,
            CODES=codes,
            num_warps=_num_warps(block),
        )
    return out, scale_T1


def _launch(
    x_TC: Tensor, y_TC: Tensor | None, gain_C: Tensor | None, eps: float, codes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum (x itself without y), the result, and its scale_T1 (empty without codes)."""
    num_rows, width = x_TC.shape
    assert x_TC.stride(1) == 1 and (y_TC is None or y_TC.stride(1) == 1)
    out, scale_T1 = _codes_of(x_TC, num_rows, width, codes)
    total = (
        x_TC
        if y_TC is None
        else torch.empty((num_rows, width), dtype=x_TC.dtype, device=x_TC.device)
    )
    block = _block(width)
    if num_rows:
        _norm_rows[(num_rows,)](
            *(x_TC, y_TC, gain_C, total, out, scale_T1, x_TC.stride(0)),
            *(0 if y_TC is None else y_TC.stride(0), eps),
            C=width,
            BLOCK=block,
            CODES=codes,
            HAS_RESIDUAL=y_TC is not None,
            HAS_NORM=gain_C is not None,
            num_warps=_num_warps(block),
        )
    return total, out, scale_T1


def _codes_of(like: Tensor, num_rows: int, width: int, codes: int) -> tuple[Tensor, Tensor]:
    """Memory for a result and, with codes, its scales."""
    dtype = CODE_DTYPES.get(codes, like.dtype)
    out = torch.empty((num_rows, width), dtype=dtype, device=like.device)
    num_scales = num_rows if codes in CODE_DTYPES else 0
    return out, torch.empty((num_scales, 1), dtype=torch.float32, device=like.device)


def _block(width: int) -> int:
    assert 0 < width <= LONGEST_ROW, f"rows of {width} numbers do not fit in a program"
    return max(32, 1 << (width - 1).bit_length())


def _num_warps(block: int) -> int:
    """Eight numbers per thread at first, as 16-byte loads of bfloat16 want; at most 16 warps."""
    return min(16, max(1, block // 256))
