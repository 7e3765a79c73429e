"""Paged attention by Ridgeline's Triton kernels: block tables read in place, on a GPU.

What. Decode splits each context over enough programs to fill the card and combines the parts
(Flash-Decoding); chunks of several tokens walk the block table tile by tile with an online softmax.
The cache is read once, in its own format, and never gathered. Prompts from position 0 go through
torch's scaled_dot_product_attention, whose FlashAttention and cuDNN kernels are faster on long
prompts than ours.

Paper. FlashAttention-2 (Dao 2023, arXiv 2307.08691), Flash-Decoding (Dao et al. 2023),
PagedAttention (Kwon et al. 2023, arXiv 2309.06180).

Invariant. Those of the family; shapes and grids depend on the sizes of a step's tensors alone, so
that a step can be captured in a CUDA graph.

When it loses. FlashInfer and FlashAttention-3 are written for one card each and may be faster
there. Neither is a dependency of Ridgeline.

Shape legend: T rows of the step, S rows that decode, H query heads, K key heads, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.attention.base import AttentionSite
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.kv_format import CodedKv, Fp8Kv
from ridgeline.engine.attention.paged import why_not_latent
from ridgeline.engine.attention.tables import (
    ChunkTables,
    DecodeTables,
    PagedKernels,
    TableAttention,
)
from ridgeline.engine.kernels.triton import load, why_no_fp8, why_not
from ridgeline.modelspec.model import ModelSpec

KV_FORMATS = ("float32", "bfloat16", "float16", "int8", "fp8")


def why_no_triton(device: torch.device) -> tuple[str, ...]:
    """Reasons why Triton kernels are not chosen on a device; empty if they may be.

    The interpreter, in which tests run them on the CPU, is never chosen.
    """
    if device.type != "cuda":
        return (f"runs on CUDA only, not on {device.type}",)
    return why_not(device)


class TritonKernels:
    """Ridgeline's Triton kernels over one cache, whose codes, if it has any, lie in rows."""

    def __init__(self, spec: ModelSpec, cache: KvCache) -> None:
        self.attentions = tuple(layer.attention for layer in spec.layers)
        self.layers, self.block_size = cache.layers, cache.block_size
        if isinstance(cache.format, CodedKv):
            assert cache.format.in_rows, "tiles in the order of the CPU's kernels"
        if isinstance(cache.format, Fp8Kv):  # stored as bytes, which torch can index
            self.layers = tuple(layer.view(torch.float8_e4m3fn) for layer in cache.layers)

    def store(self, kv_T2KD: Tensor, slots_T: Tensor, layer: int) -> None:
        load("rope_store").store_kv(kv_T2KD, self.layers[layer], slots_T)

    def decode(
        self, q_SHD: Tensor, tables: DecodeTables, layer: int, sinks_H: Tensor | None
    ) -> Tensor:
        attention = self.attentions[layer]
        o_SHD: Tensor = load("attention").paged_decode(
            q_SHD,
            self.layers[layer],
            tables.tables_SM,
            tables.lens_S,
            scale=attention.scale,
            window=attention.window,
            chunk=attention.chunk,
            softcap=attention.softcap,
            sinks_H=sinks_H,
            max_context=tables.tables_SM.shape[1] * self.block_size,
        )
        return o_SHD

    def prefill(
        self, q_THD: Tensor, tables: ChunkTables, layer: int, sinks_H: Tensor | None
    ) -> Tensor | None:
        attention = self.attentions[layer]
        o_THD: Tensor = load("attention").paged_prefill(
            q_THD,
            self.layers[layer],
            tables.tables_RM,
            tables.starts_R1,
            tables.lens_R,
            max_queries=tables.max_queries,
            scale=attention.scale,
            window=attention.window,
            chunk=attention.chunk,
            softcap=attention.softcap,
            sinks_H=sinks_H,
        )
        return o_THD

    def store_latent(self, rows_TW: Tensor, slots_T: Tensor, layer: int) -> None:
        rows_XW = self.layers[layer].view(-1, rows_TW.shape[-1])
        rows_XW.index_copy_(0, slots_T.long(), rows_TW.to(rows_XW.dtype))

    def decode_latent(self, q_SHW: Tensor, tables: DecodeTables, layer: int, rank: int) -> Tensor:
        o_SHR: Tensor = load("latent").latent_decode(
            q_SHW,
            self.layers[layer],
            tables.tables_SM,
            tables.lens_S,
            rank=rank,
            scale=self.attentions[layer].scale,
            max_context=tables.tables_SM.shape[1] * self.block_size,
        )
        return o_SHR


class TritonAttention(TableAttention):
    """Block tables with Triton kernels."""

    @staticmethod
    def make_kernels(spec: ModelSpec, cache: KvCache) -> PagedKernels:
        return TritonKernels(spec, cache)

    @staticmethod
    def why_not(site: AttentionSite) -> tuple[str, ...]:
        reasons = list(why_no_triton(site.device))
        if site.kv_dtype not in KV_FORMATS:
            reasons.append(f"reads a KV cache of {', '.join(KV_FORMATS)}, not {site.kv_dtype}")
        if site.kv_dtype in ("int8", "fp8") and any(size % 4 for size in site.head_dims):
            reasons.append(f"needs heads of a multiple of 4 numbers with {site.kv_dtype}")
        if site.kv_dtype == "fp8" and not reasons:
            reasons += why_no_fp8(site.device)
        return (*reasons, *why_not_latent(site))
