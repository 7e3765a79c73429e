"""llama.cpp's K-quants: blocks of 256 inputs whose group scales are quantised as well.

  Q4_K   groups of 32   w ≈ d · sc · q - dmin · m     q in 0..15, sc and m in 0..63, d, dmin fp16
  Q6_K   groups of 16   w ≈ d · sc · (q - 32)         q in 0..63, sc in -128..127, d fp16

For each group several ranges are tried; scale (and minimum) are fitted to the resulting integers by
least squares, weighted by the inputs' mean squares if text was read, and the best fit is kept. Then
the scales themselves are rounded, and weights are rounded with the rounded scales. The result is a
`Lattice` like any other (with non-integer zeros), so GPTQ and AWQ work on it; `SuperLattice.grid`
gives the bytes. Layouts: ggml's `block_q4_K`, `block_q6_K`.

When it loses: inputs that are not a multiple of 256; the pipeline uses Q5_0 or Q8_0 for them, as
llama.cpp does.

Shape suffixes: O outputs, I inputs, G groups, J inputs of a group, B blocks of 256, S groups of
one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.compress.formats.coded import BLOCKS, CodedWeight
from ridgeline.compress.formats.lattice import TINY, Lattice
from ridgeline.compress.recipe import QuantizeRecipe

BLOCK = 256
_STEPS_4 = tuple(14.0 + 0.1 * i for i in range(21))
_STEPS_6 = tuple(31.1 + 0.1 * i for i in range(19))


@dataclass(frozen=True, slots=True)
class SuperLattice(Lattice):
    """A lattice with the numbers its scales consist of: `heads` fp16 per block, as bytes; `inner`
    the groups' integers, uint8 [O, G, 1 or 2].
    """

    kind: str
    heads: Tensor
    inner_OGN: Tensor

    def grid(self, q_OI: Tensor, recipe: QuantizeRecipe) -> CodedWeight:
        write = _q4_k_bytes if self.kind == "q4_k" else _q6_k_bytes
        blocks = write(q_OI.to(torch.uint8), self.heads, self.inner_OGN)
        shape = (q_OI.shape[0], q_OI.shape[1])
        return CodedWeight(self.kind, shape, {BLOCKS: blocks.reshape(shape[0], -1).contiguous()})


def k_lattice(weight_OI: Tensor, kind: str, importance_I: Tensor | None) -> SuperLattice:
    """Scales of least squared error; `importance_I` as in `lattice` (for [I, I] its diagonal)."""
    if importance_I is not None and importance_I.dim() == 2:
        importance_I = importance_I.diagonal()
    find = _q4_k if kind == "q4_k" else _q6_k
    return find(weight_OI.float(), importance_I)


def _grouped(weight_OI: Tensor, size: int, importance_I: Tensor | None) -> tuple[Tensor, Tensor]:
    weight_OGJ = weight_OI.view(len(weight_OI), -1, size)
    if importance_I is None:
        return weight_OGJ, weight_OGJ.new_ones(weight_OGJ.shape[1:])
    return weight_OGJ, importance_I.float().view(-1, size)


def _q4_k(weight_OI: Tensor, importance_I: Tensor | None) -> SuperLattice:
    weight_OGJ, by_GJ = _grouped(weight_OI, 32, importance_I)
    scale_OG, low_OG = _fit_with_minimum(weight_OGJ, by_GJ)
    d_OB, scales_OG = _super(scale_OG, 8, 63)
    dmin_OB, lows_OG = _super(low_OG, 8, 63)
    real_OG = d_OB.repeat_interleave(8, 1) * scales_OG
    real_low_OG = dmin_OB.repeat_interleave(8, 1) * lows_OG
    flat_OG = real_OG < TINY
    real_OG = torch.where(flat_OG, TINY, real_OG)
    zero_OG = torch.where(flat_OG, 0.0, real_low_OG / real_OG)
    heads = _as_bytes(torch.stack([d_OB, dmin_OB], 2))
    inner = torch.stack([scales_OG, lows_OG], 2).to(torch.uint8)
    return SuperLattice(real_OG, zero_OG, 0, 15, 32, "q4_k", heads, inner)


def _fit_with_minimum(weight_OGJ: Tensor, by_GJ: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum per group (both >= 0; w ≈ scale · q - minimum)."""
    low_OG1 = weight_OGJ.amin(2, keepdim=True).clamp(max=0)
    width_OG1 = (weight_OGJ.amax(2, keepdim=True) - low_OG1).clamp(min=TINY)
    best_OG = torch.full(weight_OGJ.shape[:2], torch.inf)
    scale_OG, minimum_OG = width_OG1.squeeze(2) / 15, -low_OG1.squeeze(2)
    for steps in _STEPS_4:
        q_OGJ = ((weight_OGJ - low_OG1) * (steps / width_OG1)).round_().clamp_(0, 15)
        some_OG, less_OG = _regress(weight_OGJ, q_OGJ, by_GJ)
        error_OGJ = q_OGJ * some_OG.unsqueeze(2) - less_OG.unsqueeze(2) - weight_OGJ
        error_OG = (error_OGJ.square_() * by_GJ).sum(2)
        better_OG = error_OG < best_OG
        best_OG = torch.where(better_OG, error_OG, best_OG)
        scale_OG = torch.where(better_OG, some_OG, scale_OG)
        minimum_OG = torch.where(better_OG, less_OG, minimum_OG)
    return scale_OG, minimum_OG


def _regress(weight_OGJ: Tensor, q_OGJ: Tensor, by_GJ: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted least squares of w on q: slope and negated intercept, neither below 0."""
    n_G, q_OG = by_GJ.sum(1), (q_OGJ * by_GJ).sum(2)
    qq_OG, w_OG = (q_OGJ.square() * by_GJ).sum(2), (weight_OGJ * by_GJ).sum(2)
    qw_OG = (q_OGJ * weight_OGJ * by_GJ).sum(2)
    determinant_OG = n_G * qq_OG - q_OG.square()
    usable_OG = determinant_OG > 1e-12 * (n_G * qq_OG)
    over_OG = torch.where(usable_OG, determinant_OG, 1.0)
    slope_OG = torch.where(usable_OG, (n_G * qw_OG - q_OG * w_OG) / over_OG, 0.0)
    minimum_OG = torch.where(usable_OG, (q_OG * qw_OG - qq_OG * w_OG) / over_OG, -w_OG / n_G)
    through_OG = torch.where(qq_OG > 0, qw_OG / qq_OG.clamp(min=1e-30), 0.0)
    slope_OG = torch.where(minimum_OG < 0, through_OG, slope_OG)  # no minimum above 0
    return slope_OG.clamp(min=0), minimum_OG.clamp(min=0)


def _q6_k(weight_OI: Tensor, importance_I: Tensor | None) -> SuperLattice:
    weight_OGJ, by_GJ = _grouped(weight_OI, 16, importance_I)
    at_OG1 = weight_OGJ.abs().argmax(2, keepdim=True)
    top_OG1 = weight_OGJ.gather(2, at_OG1)
    top_OG1 = torch.where(top_OG1.abs() < TINY, TINY, top_OG1)
    best_OG = torch.full(weight_OGJ.shape[:2], torch.inf)
    scale_OG = torch.zeros_like(best_OG)
    for steps in _STEPS_6:
        q_OGJ = (weight_OGJ * (-steps / top_OG1)).round_().clamp_(-32, 31)
        over_OG = (q_OGJ.square() * by_GJ).sum(2).clamp(min=1e-30)
        some_OG = (q_OGJ * weight_OGJ * by_GJ).sum(2) / over_OG
        error_OG = ((q_OGJ * some_OG.unsqueeze(2) - weight_OGJ).square_() * by_GJ).sum(2)
        better_OG = error_OG < best_OG
        best_OG = torch.where(better_OG, error_OG, best_OG)
        scale_OG = torch.where(better_OG, some_OG, scale_OG)
    d_OB, scales_OG = _super(scale_OG, 16, -128)
    real_OG = d_OB.repeat_interleave(16, 1) * scales_OG
    zero_OG = torch.full_like(real_OG, 32)
    real_OG = torch.where(real_OG.abs() < TINY, TINY, real_OG)
    inner = scales_OG.to(torch.int8).view(torch.uint8).unsqueeze(2)
    return SuperLattice(real_OG, zero_OG, 0, 63, 16, "q6_k", _as_bytes(d_OB.unsqueeze(2)), inner)


def _super(values_OG: Tensor, per_block: int, top: int) -> tuple[Tensor, Tensor]:
    """The fp16 of each block (as float32), and integers that times it approximate the values; the
    value of largest magnitude becomes `top`.
    """
    values_OBS = values_OG.view(len(values_OG), -1, per_block)
    at_OB1 = values_OBS.abs().argmax(2, keepdim=True)
    d_OB1 = (values_OBS.gather(2, at_OB1) / top).half().float()
    low, high = (top, -top - 1) if top < 0 else (0, top)
    whole_OBS = torch.where(d_OB1 == 0, 0.0, values_OBS / torch.where(d_OB1 == 0, 1.0, d_OB1))
    return d_OB1.squeeze(2), whole_OBS.round().clamp(low, high).flatten(1)


def _as_bytes(heads_OBN: Tensor) -> Tensor:
    return heads_OBN.half().contiguous().view(torch.uint8)


def _q4_k_bytes(q_OI: Tensor, heads: Tensor, inner_OGN: Tensor) -> Tensor:
    """[O, B, 144]: d, dmin · 8 scales and minima of 6 bits · nibbles, two groups per 32 bytes."""
    num_out = len(q_OI)
    both_OBSN = inner_OGN.view(num_out, -1, 8, 2)
    sc, m = both_OBSN[..., 0], both_OBSN[..., 1]
    first = sc[..., :4] | ((sc[..., 4:] >> 4) << 6)
    second = m[..., :4] | ((m[..., 4:] >> 4) << 6)
    third = (sc[..., 4:] & 15) | ((m[..., 4:] & 15) << 4)
    q = q_OI.view(num_out, -1, 4, 2, 32)
    nibbles = (q[..., 0, :] | (q[..., 1, :] << 4)).flatten(2)
    return torch.cat([heads, first, second, third, nibbles], 2)


def _q6_k_bytes(q_OI: Tensor, heads: Tensor, inner_OGN: Tensor) -> Tensor:
    """[O, B, 210]: low nibbles, high pairs of bits, int8 scales, d; in halves of 128 numbers."""
    num_out = len(q_OI)
    q = q_OI.view(num_out, -1, 2, 4, 32)
    low = q & 15
    ql = (low[..., :2, :] | (low[..., 2:, :] << 4)).flatten(2)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    qh = ((q >> 4) << shifts).sum(3, dtype=torch.uint8).flatten(2)
    return torch.cat([ql, qh, inner_OGN.view(num_out, -1, 16), heads], 2)
