"""Attention over contiguous keys and values, after the blocks have been gathered.

Grouped-query attention is expressed in the shapes, so no key or value is repeated:

* one query per sequence (decode): the G query heads that share a key head become G *rows* of one
  small matrix, so that each key is read once for all of them;
* many queries of one sequence (prefill): key heads become the batch, and the G query heads read the
  same keys through a stride of zero.

Soft-capped layers (Gemma 2) need explicit scores, computed by `capped`; all others use the device's
fused attention.

Shape legend: S sequences, K key heads, G query heads per key head, T queries, L keys, D head_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend_decode(
    q_SKGD: Tensor,
    k_SKLD: Tensor,
    v_SKLD: Tensor,
    mask_S11L: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """o_SKGD of one query per sequence; the additive mask hides positions of no sequence."""
    if softcap is not None:
        return capped(q_SKGD, k_SKLD, v_SKLD, mask_S11L, scale, softcap)
    return F.scaled_dot_product_attention(q_SKGD, k_SKLD, v_SKLD, attn_mask=mask_S11L, scale=scale)


def attend_prefill(
    q_KGTD: Tensor,
    k_KLD: Tensor,
    v_KLD: Tensor,
    mask_TL: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """o_KGTD of several queries of one sequence. Without a mask, T = L and query t sees keys 0..t."""
    num_groups, num_queries = q_KGTD.shape[1:3]
    if softcap is not None:
        assert mask_TL is not None
        q_KXD = q_KGTD.flatten(1, 2).unsqueeze(0)
        mask_XL = mask_TL.repeat(num_groups, 1)
        out = capped(q_KXD, k_KLD.unsqueeze(0), v_KLD.unsqueeze(0), mask_XL, scale, softcap)
        return out.view(-1, num_groups, num_queries, q_KGTD.shape[-1])
    k_KGLD = k_KLD.unsqueeze(1).expand(-1, num_groups, -1, -1)
    v_KGLD = v_KLD.unsqueeze(1).expand(-1, num_groups, -1, -1)
    return F.scaled_dot_product_attention(
        q_KGTD, k_KGLD, v_KGLD, attn_mask=mask_TL, is_causal=mask_TL is None, scale=scale
    )


def capped(
    q_SKXD: Tensor,
    k_SKLD: Tensor,
    v_SKLD: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float,
) -> Tensor:
    """softmax(c·tanh(q·k·scale/c) + mask) v, with the softmax in float32.

    `mask` broadcasts to [S, K, X, L].
    """
    scores = torch.matmul(q_SKXD, k_SKLD.transpose(-1, -2)).float()
    scores = scores.mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores = scores.add_(mask)
    return torch.matmul(torch.softmax(scores, dim=-1).to(v_SKLD.dtype), v_SKLD)


def causal_mask(
    first_query: int,
    num_queries: int,
    first_key: int,
    num_keys: int,
    window: int | None,
    like: Tensor,
) -> Tensor:
    """Additive mask_TL in which the query at p sees keys at max(0, p-window+1)..p.

    Has the dtype and device of `like`.
    """
    q_T1 = torch.arange(first_query, first_query + num_queries, device=like.device).unsqueeze(1)
    k_L = torch.arange(first_key, first_key + num_keys, device=like.device)
    hidden_TL = k_L > q_T1
    if window is not None:
        hidden_TL |= k_L <= q_T1 - window
    zeros = torch.zeros((num_queries, num_keys), dtype=like.dtype, device=like.device)
    return zeros.masked_fill_(hidden_TL, float("-inf"))
