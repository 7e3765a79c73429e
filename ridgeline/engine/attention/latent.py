"""Multi-head latent attention: keys and values of all heads are projections of one cached vector.

What. A cached row holds the normalised latent of `rank` numbers and the rotated part of the key,
which all heads share. Attention over it has two forms that are equal but for rounding:

    expanded   k_h = [U_h c, r], v_h = V_h c for every position, then ordinary attention
    absorbed   q_h' = [U_hᵀ q_h, q_rot], all heads attend to the row [c, r] itself as to one shared
               key head, and V_h is applied to the result

Paper. DeepSeek-V2 (arXiv:2405.04434), section 2.1.2 and appendix C.

Invariant. The cache holds rank + rope_dim numbers per token and layer in either form.

When each loses. Expanding costs arithmetic per *key*, however many queries read it; absorbing makes
every query-key pair wider (2·rank + rope_dim in place of key_dim + rope_dim + value_dim). So decode
steps and short runs absorb, and long runs of a prompt expand (`LatentUp.absorbs`).

Shape legend: T tokens, H query heads, P plain part of a query head (without rotation), D = P +
rope_dim, R rank, W = R + rope_dim, V size of a value head, L cached positions, S sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from ridgeline.engine.attention.dense import KeySpan, attend_prefill, causal_mask
from ridgeline.modelspec.model import AttentionSpec

QUERIES = 512
"""Queries of a run that are attended at once, which limits the size of their mask."""


class LatentUp:
    """The projections from a layer's latent to keys (`key_HPR`) and values (`value_HVR`)."""

    __slots__ = ("key_HPR", "rank", "value_HVR")

    def __init__(self, spec: AttentionSpec, weight_OR: Tensor) -> None:
        """`weight_OR` holds the rows of one head after the other, its keys before its values."""
        assert spec.latent is not None
        self.rank = spec.latent.rank
        plain = spec.head_dim - spec.latent.rope_dim
        heads_HOR = weight_OR.view(spec.num_heads, -1, self.rank)
        self.key_HPR = heads_HOR[:, :plain].contiguous()
        self.value_HVR = heads_HOR[:, plain:].contiguous()

    @property
    def nbytes(self) -> int:
        return self.key_HPR.nbytes + self.value_HVR.nbytes

    def absorbs(self, num_queries: int) -> bool:
        """Whether the absorbed form needs less arithmetic for `num_queries` queries of one run."""
        plain, value = self.key_HPR.shape[1], self.value_HVR.shape[1]
        more_per_pair = 2 * self.rank - plain - value
        return num_queries * more_per_pair < self.rank * (plain + value)

    def absorb(self, q_THD: Tensor) -> Tensor:
        """Queries q_THW over cached rows."""
        plain = self.key_HPR.shape[1]
        absorbed_HTR = torch.bmm(q_THD[..., :plain].transpose(0, 1), self.key_HPR)
        return torch.cat((absorbed_HTR.transpose(0, 1), q_THD[..., plain:]), -1)

    def values_of(self, o_THR: Tensor) -> Tensor:
        """Results o_THV of results over latents."""
        o_HTV = torch.bmm(o_THR.transpose(0, 1), self.value_HVR.transpose(1, 2))
        return o_HTV.transpose(0, 1)

    def expand(self, rows_LW: Tensor) -> tuple[Tensor, Tensor]:
        """Keys k_HLD and values v_HLV of every head."""
        latent_LR, rotated_LX = rows_LW[:, : self.rank], rows_LW[:, self.rank :]
        k_HLP = torch.matmul(latent_LR, self.key_HPR.transpose(1, 2))
        v_HLV = torch.matmul(latent_LR, self.value_HVR.transpose(1, 2))
        return torch.cat((k_HLP, rotated_LX.expand(len(k_HLP), -1, -1)), -1), v_HLV


def attend_pieces(
    q_SHW: Tensor, pieces: Iterable[tuple[Tensor, Tensor | None]], rank: int
) -> Tensor:
    """Results o_SHR over latents of absorbed queries, scaled before, over rows in several pieces.

    Each piece is rows_SLW and an additive mask_S1L (None: all rows are seen), and is read once:
    sums so far shrink by what the largest score of a head grows (online softmax, Milakov and
    Gimelshein 2018, arXiv:1805.02867). The first piece has a row that each query sees.
    """
    top_SH1 = torch.full_like(q_SHW[..., :1], -math.inf)
    sum_SH1 = torch.zeros_like(top_SH1)
    o_SHR = torch.zeros_like(q_SHW[..., :rank])
    for rows_SLW, mask_S1L in pieces:
        scores_SHL = torch.bmm(q_SHW, rows_SLW.transpose(1, 2))
        if mask_S1L is not None:
            scores_SHL += mask_S1L
        new_SH1 = torch.maximum(top_SH1, scores_SHL.amax(-1, keepdim=True))
        shrink_SH1 = (top_SH1 - new_SH1).exp_()
        weights_SHL = scores_SHL.sub_(new_SH1).exp_()
        sum_SH1 = sum_SH1 * shrink_SH1 + weights_SHL.sum(-1, keepdim=True)
        o_SHR = torch.baddbmm(o_SHR * shrink_SH1, weights_SHL, rows_SLW[..., :rank])
        top_SH1 = new_SH1
    return o_SHR / sum_SH1


class LatentAttend(Protocol):
    """An `Attend` of a backend that runs layers with latent attention."""

    def attend_latent(self, q_THD: Tensor, rows_TW: Tensor, layer: int, up: LatentUp) -> Tensor:
        """o_THV of queries whose rotated part comes last; `rows_TW` are the new rows to cache."""
        ...


def attend_run(
    q_THD: Tensor, rows_LW: Tensor, start: int, attention: AttentionSpec, up: LatentUp
) -> Tensor:
    """o_THV of one run's queries at positions `start`.. over the latent rows 0..L-1, L = start + T;
    in the form that needs less arithmetic."""
    num_queries, absorbs = len(q_THD), up.absorbs(len(q_THD))
    k_KLX, v_KLX = (rows_LW[None], rows_LW[None, :, : up.rank]) if absorbs else up.expand(rows_LW)
    out = q_THD.new_empty((*q_THD.shape[:2], up.value_HVR.shape[1]))
    for first in range(0, num_queries, QUERIES):
        own = slice(first, min(first + QUERIES, num_queries))
        keys, begin = start + own.stop, start + first
        mask_TL = causal_mask(begin, own.stop - first, 0, keys, KeySpan(), q_THD)
        q_THX = up.absorb(q_THD[own]) if absorbs else q_THD[own]
        q_TKGX = q_THX.view(len(q_THX), len(k_KLX), -1, q_THX.shape[-1])
        o_KGTX = attend_prefill(
            q_TKGX.permute(1, 2, 0, 3),
            k_KLX[:, :keys],
            v_KLX[:, :keys],
            mask_TL,
            attention.scale,
            attention.softcap,
        )
        o_THX = o_KGTX.permute(2, 0, 1, 3).flatten(1, 2)
        out[own] = up.values_of(o_THX) if absorbs else o_THX
    return out
