"""Paged attention by FlashInfer, where that library is installed.

What. FlashInfer's `BatchPrefillWithPagedKVCacheWrapper` reads the cache in place: its layout "HND",
[page, key|value, head, position, number], is that of Ridgeline's cache. A step's tables become its
compressed rows: the pages of every run one after the other, where each run's begin, and how full
its last page is. Rows that decode are runs of one query. Soft caps and windows are arguments of the
plan, made once per step and kind of layer; sinks follow from the returned log-sum-exp, which
FlashInfer gives to base 2.

Paper. FlashInfer (Ye et al., MLSys 2025, arXiv 2501.01005).

Invariant. Those of the family.

When it loses. A plan is made on the host, which waits for the device, so decode steps are not
captured in CUDA graphs. The library never ran here: the plans were compared with the reference by a
stand-in that reads them as FlashInfer documents them. So it is only taken if asked for.

Shape legend: T rows of the step, S rows that decode, R runs, M columns of a table, P pages in use,
H query heads, B page size, D head_dim.
"""

from __future__ import annotations

import math
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ridgeline.engine.attention.base import AttentionSite
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.libraries.per_step import PerStep
from ridgeline.engine.attention.tables import (
    ChunkTables,
    DecodeTables,
    PagedKernels,
    TableAttention,
    TorchKernels,
)
from ridgeline.modelspec.model import AttentionSpec, ModelSpec

WORKSPACE_BYTES = 128 << 20
HEAD_DIMS = (64, 128, 256)


class FlashInferKernels(TorchKernels):
    """FlashInfer over one cache."""

    def __init__(self, spec: ModelSpec, cache: KvCache) -> None:
        super().__init__(spec, cache)
        self.caches = cache.layers
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._plans = PerStep()

    def decode(
        self, q_SHD: Tensor, tables: DecodeTables, layer: int, sinks_H: Tensor | None
    ) -> Tensor:
        starts_S1 = torch.arange(len(q_SHD) + 1, dtype=torch.int32, device=self.device)
        plan = self._plan(tables, layer, (starts_S1, tables.lens_S, tables.tables_SM), q_SHD)
        return self._run(plan, q_SHD, layer, sinks_H)

    def prefill(
        self, q_THD: Tensor, tables: ChunkTables, layer: int, sinks_H: Tensor | None
    ) -> Tensor | None:
        rows = tables.starts_R1, tables.lens_R, tables.tables_RM
        return self._run(self._plan(tables, layer, rows, q_THD), q_THD, layer, sinks_H)

    def _plan(
        self, step: object, layer: int, rows: tuple[Tensor, Tensor, Tensor], q_THD: Tensor
    ) -> Any:
        """The wrapper, planned for this step and kind of layer."""
        attention = self.attentions[layer]
        sizes = attention.num_heads, attention.num_kv_heads, attention.head_dim
        kind = *sizes, attention.window, attention.softcap, attention.scale
        return self._plans.get(step, kind, lambda: self._planned(attention, rows, q_THD))

    def _planned(
        self, attention: AttentionSpec, rows: tuple[Tensor, Tensor, Tensor], q_THD: Tensor
    ) -> Any:
        starts_R1, lens_R, tables_RM = rows
        indptr_R1, indices_P, last_R = compressed_rows(lens_R, tables_RM, self.block_size)
        wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, "HND"
        )
        wrapper.plan(
            starts_R1,
            indptr_R1,
            indices_P,
            last_R,
            attention.num_heads,
            attention.num_kv_heads,
            attention.head_dim,
            self.block_size,
            causal=True,
            sm_scale=attention.scale,
            window_left=-1 if attention.window is None else attention.window - 1,
            logits_soft_cap=attention.softcap,
            q_data_type=q_THD.dtype,
            kv_data_type=self.caches[0].dtype,
        )
        return wrapper

    def _run(self, plan: Any, q_THD: Tensor, layer: int, sinks_H: Tensor | None) -> Tensor:
        if sinks_H is None:
            out_THD: Tensor = plan.run(q_THD.contiguous(), self.caches[layer])
            return out_THD
        o_THD, lse_TH = plan.run(q_THD.contiguous(), self.caches[layer], return_lse=True)
        kept_TH = torch.sigmoid(lse_TH * math.log(2) - sinks_H.float())
        scaled_THD: Tensor = (o_THD * kept_TH.unsqueeze(-1)).to(q_THD.dtype)
        return scaled_THD


def compressed_rows(
    lens_R: Tensor, tables_RM: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(indptr_R1, indices_P, last_R): where each run's pages begin, the pages of all runs, and the
    tokens in each run's last page; int32."""
    pages_R = (lens_R + block_size - 1) // block_size
    indptr_R1 = torch.zeros(len(lens_R) + 1, dtype=torch.int32, device=lens_R.device)
    indptr_R1[1:] = pages_R.cumsum(0)
    columns_M = torch.arange(tables_RM.shape[1], device=lens_R.device)
    indices_P = tables_RM[columns_M < pages_R.unsqueeze(1)].int()
    return indptr_R1, indices_P, ((lens_R - 1) % block_size + 1).int()


class FlashInferAttention(TableAttention):
    """Block tables with FlashInfer."""

    why_not_captured = "FlashInfer plans each step on the host"

    @staticmethod
    def make_kernels(spec: ModelSpec, cache: KvCache) -> PagedKernels:
        return FlashInferKernels(spec, cache)

    @staticmethod
    def why_not(site: AttentionSite) -> tuple[str, ...]:
        reasons = []
        if site.device.type != "cuda":
            reasons.append(f"runs on CUDA only, not on {site.device.type}")
        if find_spec("flashinfer") is None:
            reasons.append("FlashInfer is not installed (pip install flashinfer-python)")
        if site.dtype not in (torch.bfloat16, torch.float16):
            reasons.append("computes in bfloat16 or float16 (--dtype)")
        if site.kv_dtype not in ("bfloat16", "float16"):
            reasons.append(f"reads a KV cache of bfloat16 or float16, not {site.kv_dtype}")
        if any(size not in HEAD_DIMS for size in site.head_dims):
            reasons.append(f"has kernels for heads of {', '.join(map(str, HEAD_DIMS))} numbers")
        if site.has_chunk:
            reasons.append("has no chunked attention")
        if site.has_latent:
            reasons.append("has no tables of latent rows")
        return tuple(reasons)
