"""Min-p, top-k and top-p over many rows at once, exactly, mostly without sorting the vocabulary.

What: the kept set is a head of the order (logit falling, id rising), so it is described by one
number per row: how many tokens stay. Top-k names that number; top-p needs the largest probabilities
in order, and real distributions reach p within a few hundred tokens, so only the `_HEAD` largest
are looked at first; rows where that does not settle it (flat distributions) are redone over the
whole vocabulary. The number then becomes a threshold on the logits, with the tokens that tie at the
threshold admitted by id.

Invariant: equal to sorting every row (`reference.py`), ties included. Top-p's masses are summed in
float64.
When it loses: near-uniform rows pay for both passes.

Shapes: R rows, V vocabulary, W the width of the head looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.records import Sampling

_HEAD = 256


def restrict(scaled_RV: Tensor, asked: Sequence[Sampling]) -> Tensor:
    """Excluded tokens at -inf. `scaled_RV`: logits over temperature, each row's largest at 0."""
    if any(sampling.min_p > 0 for sampling in asked):
        floor_R = [math.log(sampling.min_p) if sampling.min_p else -math.inf for sampling in asked]
        floor_R1 = torch.tensor(floor_R, device=scaled_RV.device).unsqueeze(1)
        scaled_RV = scaled_RV.masked_fill(scaled_RV < floor_R1, -math.inf)
    width = scaled_RV.shape[1]
    rows = [row for row, s in enumerate(asked) if s.top_p < 1 or 0 < s.top_k < width]
    if not rows:
        return scaled_RV
    row_R = torch.tensor(rows, device=scaled_RV.device)
    heads = _cut(scaled_RV[row_R], [asked[row] for row in rows])
    return scaled_RV.index_copy(0, row_R, heads)


def _cut(scaled_RV: Tensor, asked: Sequence[Sampling]) -> Tensor:
    """Top-k, then top-p over what top-k left. Every row asks for at least one of them."""
    num_tokens = scaled_RV.shape[1]
    k_R = [s.top_k if s.top_k > 0 else num_tokens for s in asked]
    narrow = max([_HEAD, *(k for k in k_R if k < num_tokens)])
    value_RW, kept_R1, settled = _head(scaled_RV, asked, k_R, min(narrow, num_tokens))
    if not settled:
        value_RW, kept_R1, _ = _head(scaled_RV, asked, k_R, num_tokens)
    edge_R1 = value_RW.gather(1, kept_R1 - 1)
    num_ties_R1 = kept_R1 - (value_RW > edge_R1).sum(1, keepdim=True)
    return scaled_RV.masked_fill(~_above(scaled_RV, edge_R1, num_ties_R1), -math.inf)


def _head(
    scaled_RV: Tensor, asked: Sequence[Sampling], k_R: Sequence[int], width: int
) -> tuple[Tensor, Tensor, bool]:
    """The `width` largest values, how many tokens each row keeps, and if `width` settled it."""
    value_RW = scaled_RV.topk(width).values
    k_R1 = torch.tensor(k_R, device=value_RW.device).unsqueeze(1)
    p_R1 = torch.tensor([s.top_p for s in asked], dtype=torch.float64, device=value_RW.device)[
        :, None
    ]
    in_k_RW = torch.arange(width, device=value_RW.device) < k_R1
    mass_RW = value_RW.exp().double() * in_k_RW
    tail_R1 = scaled_RV.exp().sum(1, keepdim=True, dtype=torch.float64)
    total_R1 = torch.where(k_R1 <= width, mass_RW.sum(1, keepdim=True), tail_R1)
    before_RW = mass_RW.cumsum(1) - mass_RW
    in_p_RW = (before_RW < p_R1 * total_R1) | (p_R1 >= 1)
    kept_R1 = (in_k_RW & in_p_RW).sum(1, keepdim=True)
    settled = (kept_R1 < width) | (k_R1 <= width)
    return value_RW, kept_R1, width == scaled_RV.shape[1] or bool(settled.all())


def _above(scaled_RV: Tensor, edge_R1: Tensor, num_ties_R1: Tensor) -> Tensor:
    """Tokens over the edge, and of those that equal it the first `num_ties` by id."""
    tie_RV = scaled_RV == edge_R1
    if bool((tie_RV.sum(1, keepdim=True) > num_ties_R1).any()):
        tie_RV &= tie_RV.cumsum(1) <= num_ties_R1
    return tie_RV | (scaled_RV > edge_R1)
