"""Attention over contiguous keys and values, after the blocks have been gathered.

Grouped-query attention is expressed in the shapes, so no key or value is repeated:

* one query per sequence (decode): the G query heads that share a key head become G *rows* of one
  small matrix, so that each key is read once for all of them;
* many queries of one sequence (prefill): key heads become the batch, and the G query heads read the
  same keys through a stride of zero.

Layers with soft caps (Gemma 2) or sinks (gpt-oss) need explicit scores, computed by `explicit`; all
others use the device's fused attention.

Shape legend: S sequences, K key heads, G query heads per key head, T queries, L keys, D head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.modelspec.model import AttentionSpec


def attend_decode(
    q_SKGD: Tensor,
    k_SKLD: Tensor,
    v_SKLD: Tensor,
    mask_S11L: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """o_SKGD of one query per sequence; the additive mask hides positions of no sequence."""
    if softcap is not None or sinks_H is not None:
        sinks_KX = None if sinks_H is None else sinks_H.view(q_SKGD.shape[1], -1)
        return explicit(q_SKGD, k_SKLD, v_SKLD, mask_S11L, scale, softcap, sinks_KX)
    return F.scaled_dot_product_attention(q_SKGD, k_SKLD, v_SKLD, attn_mask=mask_S11L, scale=scale)


def attend_prefill(
    q_KGTD: Tensor,
    k_KLD: Tensor,
    v_KLD: Tensor,
    mask_TL: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """o_KGTD of several queries of one sequence.

    Without a mask, T = L and query t sees keys 0..t.
    """
    num_groups, num_queries = q_KGTD.shape[1:3]
    if softcap is not None or sinks_H is not None:
        assert mask_TL is not None
        q_KXD = q_KGTD.flatten(1, 2).unsqueeze(0)
        mask_XL = mask_TL.repeat(num_groups, 1)
        sinks_KX = None
        if sinks_H is not None:  # row x = g · T + t is head g of its key head
            sinks_KX = sinks_H.view(-1, num_groups).repeat_interleave(num_queries, 1)
        k_SKLD, v_SKLD = k_KLD.unsqueeze(0), v_KLD.unsqueeze(0)
        out = explicit(q_KXD, k_SKLD, v_SKLD, mask_XL, scale, softcap, sinks_KX)
        return out.view(-1, num_groups, num_queries, q_KGTD.shape[-1])
    k_KGLD = k_KLD.unsqueeze(1).expand(-1, num_groups, -1, -1)
    v_KGLD = v_KLD.unsqueeze(1).expand(-1, num_groups, -1, -1)
    return F.scaled_dot_product_attention(
        q_KGTD, k_KGLD, v_KGLD, attn_mask=mask_TL, is_causal=mask_TL is None, scale=scale
    )


def explicit(
    q_SKXD: Tensor,
    k_SKLD: Tensor,
    v_SKLD: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks_KX: Tensor | None,
) -> Tensor:
    """softmax(scores + mask) v with the softmax in float32.

    Scores are q·k·scale, as c·tanh(s/c) where there is a cap. `mask` broadcasts to [S, K, X, L]; a
    sink is one more score of its row, without a value.
    """
    scores = torch.matmul(q_SKXD, k_SKLD.transpose(-1, -2)).float()
    scores = scores.mul_(scale if softcap is None else scale / softcap)
    if softcap is not None:
        scores = scores.tanh_().mul_(softcap)
    if mask is not None:
        scores = scores.add_(mask)
    if sinks_KX is not None:
        sinks = sinks_KX.float().unsqueeze(-1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = torch.softmax(scores, dim=-1)[..., : k_SKLD.shape[-2]]
    return torch.matmul(weights.to(v_SKLD.dtype), v_SKLD)


def needs_scores(attention: AttentionSpec) -> bool:
    """Whether a layer's scores must be computed explicitly."""
    return attention.softcap is not None or attention.sinks


class KeySpan(NamedTuple):
    """Which keys a query sees: those of a window, those of its chunk, or all up to its own."""

    window: int | None = None
    chunk: int | None = None

    @staticmethod
    def of(attention: AttentionSpec) -> KeySpan:
        return KeySpan(attention.window, attention.chunk)

    def first_seen(self, position: int) -> int:
        """The first key that the query at `position` sees."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        return 0 if self.chunk is None else position // self.chunk * self.chunk

    def hide(self, hidden: Tensor, queries: Tensor, keys: Tensor) -> None:
        """Mark the keys before the first that a query sees; arguments are positions."""
        if self.window is not None:
            hidden |= keys <= queries - self.window
        if self.chunk is not None:
            hidden |= keys < queries // self.chunk * self.chunk


def causal_mask(
    first_query: int,
    num_queries: int,
    first_key: int,
    num_keys: int,
    span: KeySpan,
    like: Tensor,
) -> Tensor:
    """Additive mask_TL in which the query at p sees the keys of `span` up to p.

    Has the dtype and device of `like`.
    """
    q_T1 = torch.arange(first_query, first_query + num_queries, device=like.device).unsqueeze(1)
    k_L = torch.arange(first_key, first_key + num_keys, device=like.device)
    hidden_TL = k_L > q_T1
    span.hide(hidden_TL, q_T1, k_L)
    zeros = torch.zeros((num_queries, num_keys), dtype=like.dtype, device=like.device)
    return zeros.masked_fill_(hidden_TL, float("-inf"))
