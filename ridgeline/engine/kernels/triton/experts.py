"""Mixture-of-experts products in Triton: all chosen experts of a step in one launch.

What. (token, expert) pairs are sorted by expert on the device; a program multiplies some rows of
one expert with a part of its outputs. Rows are gathered through the order and results scattered
through it, so nothing is permuted in memory, and no count reaches the host: the grid bounds the
number of tiles by P // M + E, and programs beyond the last tile return.

Source. Grouped products as in MegaBlocks (Gale et al. 2022, arXiv:2211.15841).

Invariant. A token's result is the sum of its experts' results in the order of its own ranking, in
float32, so it depends on the token alone, but for rounding.

When it loses. Many tokens per expert: cuBLAS per expert is nearer to the peak, but needs the counts
on the host.

Shape legend: T tokens, X experts per token, P = T·X pairs, E experts, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.engine.kernels.triton.attention import tile_of
from ridgeline.engine.kernels.triton.linear import fold_plain
from ridgeline.engine.kernels.triton.norm import silu_mul
from ridgeline.engine.kernels.triton.tiles import Card, card_of, padded

OUTPUTS, INPUTS = 64, 128
MOST_ROWS, FLOAT32_ROWS = 64, 16
STAGES = 4


@triton.jit
def _multiply_experts(
    x, w, scale, order, starts, weights, out, num_experts, num_out, num_in, x_stride,
    GATHERS: tl.constexpr, SCATTERS: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """N outputs of up to M rows of one expert. `GATHERS`: pairs per row of x (0: x is sorted)."""
    expert, first = tile_of(tl.program_id(0), starts, num_experts, M)
    begin = tl.load(starts + expert)
    num_rows = tl.load(starts + expert + 1) - begin
    if first >= num_rows:
        return
    t = first + tl.arange(0, M)
    t_seen = t < num_rows
    row = (begin + t).to(tl.int64)
    pair = tl.load(order + row, mask=t_seen, other=0).to(tl.int64)
    x_row = pair // GATHERS if GATHERS > 0 else row
    x_at = x + (x_row * x_stride)[:, None]
    o = (tl.program_id(1) * N + tl.arange(0, N)).to(tl.int64)
    o_seen = o < num_out
    of_expert = expert.to(tl.int64)
    w_at = w + of_expert * num_out * num_in
    acc = tl.zeros([N, M], tl.float32)
    for k in range(0, num_in, BK):
        acc = fold_plain(acc, x_at, w_at, o, o_seen, t_seen, k, num_in, num_in, BK, PRECISION)
    if HAS_SCALE:
        s = tl.load(scale + of_expert * num_out + o, mask=o_seen, other=0.0)
        acc = acc * s.to(tl.float32)[:, None]
    if HAS_WEIGHTS:
        acc = acc * tl.load(weights + pair, mask=t_seen, other=0.0).to(tl.float32)[None, :]
    out_row = pair if SCATTERS else row
    out_at = out + (out_row * num_out)[None, :] + o[:, None]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=o_seen[:, None] & t_seen[None, :])


def sort_pairs(expert_TX: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """order_P, the pairs t·X + x by expert, and starts_E1, the first of each expert (int32)."""
    expert_P = expert_TX.reshape(-1).long()
    order_P = torch.argsort(expert_P, stable=True).int()
    counts_E1 = torch.zeros(num_experts + 1, dtype=torch.int32, device=expert_P.device)
    counts_E1.scatter_add_(0, expert_P + 1, torch.ones_like(order_P))
    return order_P, counts_E1.cumsum(0, dtype=torch.int32)


def multiply_experts(
    x: Tensor,
    w_EOI: Tensor,
    order_P: Tensor,
    starts_E1: Tensor,
    *,
    num_chosen: int = 0,
    scale_EO: Tensor | None = None,
    weight_P: Tensor | None = None,
    scatters: bool = False,
) -> Tensor:
    """y of every pair with the weights of its expert, contiguous [E, O, I].

    With `num_chosen` (X), x holds a row per token; else a row per pair, sorted by expert. Results
    are sorted by expert or, with `scatters`, in the order of pairs. `weight_P` multiplies results;
    `scale_EO` goes with weights in int8 or float8_e4m3fn.
    """
    num_pairs, (num_experts, num_out, num_in) = len(order_P), w_EOI.shape
    assert w_EOI.is_contiguous() and x.stride(1) == 1 and x.shape[1] == num_in
    y_PO = torch.empty((num_pairs, num_out), dtype=x.dtype, device=x.device)
    if num_pairs == 0:
        return y_PO
    most = FLOAT32_ROWS if x.dtype == torch.float32 else MOST_ROWS
    rows = min(most, padded(-(-2 * num_pairs // num_experts)))  # twice the mean
    grid = (num_pairs // rows + num_experts, triton.cdiv(num_out, OUTPUTS))
    _multiply_experts[grid](
        *(x, w_EOI, scale_EO, order_P, starts_E1, weight_P, y_PO),
        *(num_experts, num_out, num_in, x.stride(0)),
        GATHERS=num_chosen,
        SCATTERS=scatters,
        HAS_SCALE=scale_EO is not None,
        HAS_WEIGHTS=weight_P is not None,
        M=rows,
        N=OUTPUTS,
        BK=INPUTS,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=stages_of(rows, x.dtype, card_of(x.device)),
    )
    return y_PO


def stages_of(rows: int, dtype: torch.dtype, card: Card) -> int:
    """Stages of inputs that fit in a block's shared memory; one of them is never in it."""
    stage = (OUTPUTS + rows) * INPUTS * dtype.itemsize
    return max(2, min(STAGES, 1 + card.shared_bytes // stage))


def experts_mlp(
    x_TC: Tensor,
    weight_TX: Tensor,
    expert_TX: Tensor,
    gate_up_EOC: Tensor,
    down_ECI: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """y_TC: the weighted sum of each token's experts down(silu(gate) · up).

    `gate_up_EOC` holds the gate's outputs before those of up. `scales` are those of 8-bit weights.
    """
    num_chosen = expert_TX.shape[1]
    order_P, starts_E1 = sort_pairs(expert_TX, len(gate_up_EOC))
    of_gate_up, of_down = scales or (None, None)
    hidden_PO = multiply_experts(
        *(x_TC, gate_up_EOC, order_P, starts_E1), num_chosen=num_chosen, scale_EO=of_gate_up
    )
    y_PC = multiply_experts(
        *(silu_mul(hidden_PO), down_ECI, order_P, starts_E1),
        scale_EO=of_down,
        weight_P=weight_TX.reshape(-1),
        scatters=True,
    )
    summed_TC = y_PC.view(*expert_TX.shape, -1).sum(1, dtype=torch.float32)
    return summed_TC.to(x_TC.dtype)
