"""INT4 weights widened to a float dtype in one pass, for products of many rows.

A weight of [O, I] is read in half a byte and written in two per number, a third of which a product
of many rows reads again: less time than the product from some hundred rows on.

Shape legend: O outputs, I inputs, J bytes, G groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

HALF = tl.constexpr(64)  # inputs that share a run of low, or of high, nibbles
OUTPUTS = 16  # of one program


@triton.jit
def _widen(
    packed, scales, zeros, out, num_out, num_in, num_bytes, num_groups,
    GROUP: tl.constexpr, ZEROS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    j = tl.arange(0, HALF)
    inside = row < num_out
    byte = tl.load(
        packed + row[:, None] * num_bytes + (tl.program_id(1) * HALF + j)[None, :],
        mask=inside[:, None],
        other=0,
    )
    for half in tl.static_range(2):
        q = (byte >> 4) if half else (byte & 15)
        i = tl.program_id(1) * 2 * HALF + half * HALF + j
        seen = inside[:, None] & (i < num_in)[None, :]
        group = row[:, None] * num_groups + (i // GROUP)[None, :]
        scale = tl.load(scales + group, mask=seen, other=0.0).to(tl.float32)
        zero = tl.load(zeros + group, mask=seen, other=0).to(tl.float32) if ZEROS else 8.0
        weight = (q.to(tl.float32) - zero) * scale
        at = out + row[:, None] * num_in + i[None, :]
        tl.store(at, weight.to(out.dtype.element_ty), mask=seen)


def widen_int4(
    packed_OJ: Tensor,
    scale_OG: Tensor,
    zero_OG: Tensor | None,
    *,
    group_size: int,
    num_in: int,
    dtype: torch.dtype,
) -> Tensor:
    """w_OI = (q - zero) · scale in `dtype`, of nibbles in the layout of `linear.pack_int4`.

    `zero_OG` None: 8.
    """
    num_out, num_bytes = packed_OJ.shape
    out_OI = torch.empty((num_out, num_in), dtype=dtype, device=packed_OJ.device)
    _widen[(triton.cdiv(num_out, OUTPUTS), num_bytes // HALF.value)](
        *(packed_OJ, scale_OG, zero_OG, out_OI, num_out, num_in, num_bytes, scale_OG.shape[1]),
        GROUP=group_size,
        ZEROS=zero_OG is not None,
        ROWS=OUTPUTS,
    )
    return out_OI
