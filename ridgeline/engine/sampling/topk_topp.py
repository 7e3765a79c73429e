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
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.records import Sampling

_HEAD = 256


class Limits(NamedTuple):
    """What each row keeps, on the device: log(min_p), top_k (the vocabulary's size if none), top_p.

    `width` largest logits are examined for top-k and top-p; 0: no row has either.
    """

    floor_R1: Tensor
    k_R1: Tensor
    p_R1: Tensor
    width: int


def limits_of(sampling: Sampling, num_tokens: int) -> tuple[float, int, float]:
    """A row of `Limits`, for the host."""
    floor = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
    limited = 0 < sampling.top_k < num_tokens
    return floor, sampling.top_k if limited else num_tokens, min(sampling.top_p, 1.0)


def head_width(rows: Sequence[tuple[float, int, float]], num_tokens: int) -> int:
    """How many of the largest logits are examined first; 0 where no row is limited."""
    if all(k == num_tokens and p >= 1 for _, k, p in rows):
        return 0
    return min(max([_HEAD, *(k for _, k, _ in rows if k < num_tokens)]), num_tokens)


def restrict(scaled_RV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Set excluded tokens to -inf.

    `scaled_RV` holds logits divided by the temperature, shifted so that each row's largest is 0.
    """
    num_tokens, device = scaled_RV.shape[1], scaled_RV.device
    rows = [limits_of(sampling, num_tokens) for sampling in samplings]
    packed_R3 = torch.tensor(rows, dtype=torch.float64, device=device)
    floor_R1, k_R1, p_R1 = packed_R3.split(1, dim=1)
    limits = Limits(floor_R1.float(), k_R1.long(), p_R1, head_width(rows, num_tokens))
    kept_RV, settled_R = restrict_once(scaled_RV, limits)
    if not bool(settled_R.all()):
        kept_RV, _ = restrict_once(scaled_RV, limits._replace(width=num_tokens))
    return kept_RV


def restrict_once(scaled_RV: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """The same without waiting for the device; rows not in `settled_R` need a larger width."""
    scaled_RV = scaled_RV.masked_fill(scaled_RV < limits.floor_R1, -math.inf)
    if not limits.width:
        return scaled_RV, torch.ones(len(scaled_RV), dtype=torch.bool, device=scaled_RV.device)
    value_RW, kept_R1, settled_R1 = _num_kept(scaled_RV, limits)
    threshold_R1 = value_RW.gather(1, kept_R1 - 1)
    num_ties_R1 = kept_R1 - (value_RW > threshold_R1).sum(1, keepdim=True)
    tie_RV = scaled_RV == threshold_R1
    tie_RV &= tie_RV.cumsum(1, dtype=torch.int32) <= num_ties_R1  # the first by id
    is_free_R1 = (limits.k_R1 >= scaled_RV.shape[1]) & (limits.p_R1 >= 1)
    is_out_RV = ~(tie_RV | (scaled_RV > threshold_R1) | is_free_R1)
    return scaled_RV.masked_fill(is_out_RV, -math.inf), (settled_R1 | is_free_R1).squeeze(1)


def _num_kept(scaled_RV: Tensor, limits: Limits) -> tuple[Tensor, Tensor, Tensor]:
    """The `width` largest values, the number of tokens each row keeps, and if `width` sufficed."""
    k_R1, p_R1, width = limits.k_R1, limits.p_R1, limits.width
    value_RW = scaled_RV.topk(width).values
    in_k_RW = torch.arange(width, device=value_RW.device) < k_R1
    mass_RW = value_RW.exp().double() * in_k_RW
    tail_R1 = scaled_RV.exp().sum(1, keepdim=True, dtype=torch.float64)
    total_R1 = torch.where(k_R1 <= width, mass_RW.sum(1, keepdim=True), tail_R1)
    before_RW = mass_RW.cumsum(1) - mass_RW
    in_p_RW = (before_RW < p_R1 * total_R1) | (p_R1 >= 1)
    kept_R1 = (in_k_RW & in_p_RW).sum(1, keepdim=True).clamp(min=1)  # NaN keeps none
    settled_R1 = (kept_R1 < width) | (k_R1 <= width)
    return value_RW, kept_R1, settled_R1 if width < scaled_RV.shape[1] else settled_R1 | True
