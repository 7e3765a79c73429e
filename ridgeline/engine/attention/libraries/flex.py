"""Paged attention by torch's FlexAttention: masks and caps as functions, compiled into one kernel.

What. Blocks of a step's tables are gathered, as by the plain kernels of `TableAttention`; then
`torch.nn.attention.flex_attention` computes all rows at once. Windows, chunks and the bounds
between sequences are a `mask_mod`, soft caps a `score_mod`, and sinks follow from the returned
log-sum-exp: a sink of logit s scales the output by sigmoid(lse - s). On CUDA torch compiles these
functions into a fused kernel and skips blocks that are masked as a whole. On a CPU it computes
every score in memory: the reference of what the compiled kernel should give.

Paper. FlexAttention (Dong et al. 2024, arXiv 2412.05496).

Invariant. Those of the family. Scores and their softmax are computed in float32.

When it loses. Keys are copied out of the cache first, which the Triton kernels avoid, and each new
shape of a step is compiled. It never ran on a GPU here, so that it is only taken if asked for. Each
mask is built once per step and kind of layer.

Shape legend: T rows of the step, S rows that decode, R runs, M columns of a table, H query heads, K
key heads, L gathered positions of a table, D head_dim.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from ridgeline.engine.attention.base import AttentionSite
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.dense import KeySpan
from ridgeline.engine.attention.libraries.per_step import PerStep
from ridgeline.engine.attention.tables import (
    ChunkTables,
    DecodeTables,
    PagedKernels,
    TableAttention,
    TorchKernels,
)
from ridgeline.modelspec.model import AttentionSpec, ModelSpec

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) → whether the query sees the key; all are indices."""


class FlexKernels(TorchKernels):
    """Gathers tables and attends by FlexAttention."""

    def __init__(self, spec: ModelSpec, cache: KvCache) -> None:
        super().__init__(spec, cache)
        self._masks = PerStep()

    def decode(
        self, q_SHD: Tensor, tables: DecodeTables, layer: int, sinks_H: Tensor | None
    ) -> Tensor:
        attention, num_rows = self.attentions[layer], len(q_SHD)
        if not num_rows:
            return torch.empty_like(q_SHD)
        k_SKLD, v_SKLD = self._gathered(tables.tables_SM, layer)
        positions_S = (tables.lens_S - 1).long()

        def mask_of(span: KeySpan) -> Mask:
            def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                return in_span(span, positions_S[row], key)

            return sees

        mask = self._block_mask(tables, attention, mask_of, (num_rows, 1, k_SKLD.shape[2]))
        o_SH1D: Tensor = attend(q_SHD.unsqueeze(2), k_SKLD, v_SKLD, mask, attention, sinks_H)
        return o_SH1D.squeeze(2)

    def prefill(
        self, q_THD: Tensor, tables: ChunkTables, layer: int, sinks_H: Tensor | None
    ) -> Tensor | None:
        attention, num_rows = self.attentions[layer], len(q_THD)
        k_RKLD, v_RKLD = self._gathered(tables.tables_RM, layer)
        length = k_RKLD.shape[2]
        starts_R1 = tables.starts_R1.long()
        rows_T = torch.arange(num_rows, device=q_THD.device)
        run_T = torch.searchsorted(starts_R1[1:], rows_T, right=True)
        positions_T = tables.lens_R.long()[run_T] - starts_R1[run_T + 1] + rows_T

        def mask_of(span: KeySpan) -> Mask:
            def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                is_own: Tensor = run_T[query] == key // length
                return is_own & in_span(span, positions_T[query], key % length)

            return sees

        mask = self._block_mask(tables, attention, mask_of, (1, num_rows, len(k_RKLD) * length))
        k_1KXD, v_1KXD = (x.transpose(0, 1).flatten(1, 2).unsqueeze(0) for x in (k_RKLD, v_RKLD))
        q_1HTD = q_THD.transpose(0, 1).unsqueeze(0)
        o_1HTD = attend(q_1HTD, k_1KXD, v_1KXD, mask, attention, sinks_H)
        return o_1HTD[0].transpose(0, 1)

    def _gathered(self, tables_SM: Tensor, layer: int) -> Tensor:
        """kv_2SKLD of whole tables."""
        num_heads = self.attentions[layer].num_kv_heads
        sides = torch.arange(2 * num_heads, device=self.device).view(2, 1, num_heads, 1)
        tiles = tables_SM.view(1, len(tables_SM), 1, -1) * (2 * num_heads) + sides
        return self.layers[layer].gather(tiles.reshape(-1), len(tables_SM))

    def _block_mask(
        self,
        tables: object,
        attention: AttentionSpec,
        mask_of: Callable[[KeySpan], Mask],
        shape: tuple[int, int, int],
    ) -> Any:
        """The block mask [batch, query, key] of a step's tables for one kind of layer."""
        span, (batch, queries, keys) = KeySpan.of(attention), shape

        def make() -> Any:
            return flex.create_block_mask(
                mask_of(span), batch, None, queries, keys, device=self.device
            )

        return self._masks.get(tables, span, make)


def in_span(span: KeySpan, position: Tensor, key: Tensor) -> Tensor:
    """Whether the query at `position` sees the key at position `key`."""
    seen = key <= position
    if span.window is not None:
        seen = seen & (key > position - span.window)
    if span.chunk is not None:
        seen = seen & (key >= position // span.chunk * span.chunk)
    return seen


def attend(
    q_SHTD: Tensor,
    k_SKLD: Tensor,
    v_SKLD: Tensor,
    mask: Any,
    attention: AttentionSpec,
    sinks_H: Tensor | None,
) -> Tensor:
    """o_SHTD; query head h reads key head h // (H / K)."""
    o_SHTD: Tensor
    o_SHTD, aux = _kernel(q_SHTD.device.type)(
        q_SHTD,
        k_SKLD,
        v_SKLD,
        score_mod=_capped(attention.softcap),
        block_mask=mask,
        scale=attention.scale,
        enable_gqa=True,
        return_aux=flex.AuxRequest(lse=True),
    )
    if sinks_H is None:
        return o_SHTD.to(q_SHTD.dtype)
    kept_SHT: Tensor = torch.sigmoid(aux.lse - sinks_H.float()[:, None])
    return (o_SHTD * kept_SHT.unsqueeze(-1)).to(q_SHTD.dtype)


def _capped(cap: float | None) -> Callable[..., Tensor] | None:
    """The `score_mod` of a soft cap."""
    if cap is None:
        return None

    def capped(score: Tensor, *indices: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


@functools.cache
def _kernel(device: str) -> Callable[..., Any]:
    """FlexAttention, compiled where torch makes one kernel of it."""
    if device == "cuda":
        compiled: Callable[..., Any] = torch.compile(flex.flex_attention, dynamic=True)
        return compiled

    def unfused(*arguments: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            return flex.flex_attention(*arguments, **options)

    return unfused


class FlexAttention(TableAttention):
    """Block tables with FlexAttention."""

    why_not_captured = "FlexAttention builds its masks from the lengths of each step"

    @staticmethod
    def make_kernels(spec: ModelSpec, cache: KvCache) -> PagedKernels:
        return FlexKernels(spec, cache)

    @staticmethod
    def why_not(site: AttentionSite) -> tuple[str, ...]:
        reasons = ["has no tables of latent rows"] if site.has_latent else []
        if site.kv_dtype == "int4":
            reasons.append("reads no KV cache in INT4")
        return tuple(reasons)
