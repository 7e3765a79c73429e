"""Min-p, top-k and top-p over many rows at once: exact, and mostly without sorting the vocabulary.

What. The kept tokens are a prefix of the order (logit falling, id rising), so one number per row
describes them: how many are kept. Top-k gives that number directly. Top-p needs the largest
probabilities in order, and real distributions reach p within a few hundred tokens, so only the
`_HEAD` largest are examined first; if that is not enough for some row (flat distributions), the
whole vocabulary is. The number then becomes a threshold on the logits, and tokens that tie with the
threshold are admitted by id.

Invariant. Equal to sorting every row (`reference.py`), ties included. The masses of top-p are
summed in float64.

When it loses. Near-uniform rows pay for both passes.

Shapes: R rows, V vocabulary, W the number of largest logits examined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.records import Sampling

_HEAD = 256


def restrict(scaled_RV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Set excluded tokens to -inf.

    `scaled_RV` holds logits divided by the temperature, shifted so that each row's largest is 0.
    """
    if any(sampling.min_p > 0 for sampling in samplings):
        floor_R = [
            math.log(sampling.min_p) if sampling.min_p else -math.inf for sampling in samplings
        ]
        floor_R1 = torch.tensor(floor_R, device=scaled_RV.device).unsqueeze(1)
        scaled_RV = scaled_RV.masked_fill(scaled_RV < floor_R1, -math.inf)
    width = scaled_RV.shape[1]
    rows = [row for row, s in enumerate(samplings) if s.top_p < 1 or 0 < s.top_k < width]
    if not rows:
        return scaled_RV
    row_R = torch.tensor(rows, device=scaled_RV.device)
    heads = _truncate(scaled_RV[row_R], [samplings[row] for row in rows])
    return scaled_RV.index_copy(0, row_R, heads)


def _truncate(scaled_RV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Top-k, then top-p over the rest. Every row has at least one of them."""
    num_tokens = scaled_RV.shape[1]
    k_R = [s.top_k if s.top_k > 0 else num_tokens for s in samplings]
    width = max([_HEAD, *(k for k in k_R if k < num_tokens)])
    value_RW, kept_R1, settled = _num_kept(scaled_RV, samplings, k_R, min(width, num_tokens))
    if not settled:
        value_RW, kept_R1, _ = _num_kept(scaled_RV, samplings, k_R, num_tokens)
    threshold_R1 = value_RW.gather(1, kept_R1 - 1)
    num_ties_R1 = kept_R1 - (value_RW > threshold_R1).sum(1, keepdim=True)
    return scaled_RV.masked_fill(~_is_kept(scaled_RV, threshold_R1, num_ties_R1), -math.inf)


def _num_kept(
    scaled_RV: Tensor, samplings: Sequence[Sampling], k_R: Sequence[int], width: int
) -> tuple[Tensor, Tensor, bool]:
    """The `width` largest values, the number of tokens each row keeps, and if `width` sufficed."""
    value_RW = scaled_RV.topk(width).values
    k_R1 = torch.tensor(k_R, device=value_RW.device).unsqueeze(1)
    p_R1 = torch.tensor([s.top_p for s in samplings], dtype=torch.float64, device=value_RW.device)[
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


def _is_kept(scaled_RV: Tensor, threshold_R1: Tensor, num_ties_R1: Tensor) -> Tensor:
    """Tokens above the threshold, and the first `num_ties` by id of those equal to it."""
    tie_RV = scaled_RV == threshold_R1
    if bool((tie_RV.sum(1, keepdim=True) > num_ties_R1).any()):
        tie_RV &= tie_RV.cumsum(1) <= num_ties_R1
    return tie_RV | (scaled_RV > threshold_R1)
