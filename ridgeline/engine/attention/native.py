"""Paged attention by Ridgeline's CPU kernel (native/attention/kernel.h).

What. One kernel for decode, chunks and prefill. It walks the block table tile by tile (64 keys),
keeps an online softmax per query row, and lets the query heads of a group share each load of a key.
A single long sequence is split along its context so that every core contributes.

Paper. FlashAttention (Dao et al. 2022, arXiv 2205.14135) for the online softmax; Flash-Decoding
(Dao et al. 2023) for the split over the context; PagedAttention (Kwon et al. 2023, arXiv
2309.06180).

Invariant, in addition to the family's. A row's result is bitwise the same whatever it is batched
with, however its prompt was chunked, and on any number of threads. The reduction order that
guarantees this is documented in native/attention/attention.h.

When it loses. It computes in float32 only, and other devices have better kernels.

Shape legend: T new tokens, H query heads, K key heads, N blocks, B block_size, D head_dim,
W numbers of a stored row.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

import ridgeline._native as _native
from ridgeline.engine.attention.base import AttentionSite
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.scheduler.plan import Run, stored_runs
from ridgeline.modelspec.format import KV_GROUP
from ridgeline.modelspec.model import ModelSpec

MAX_HEAD_DIM = 256
KV_FORMATS = ("float32", "bfloat16", "float16", "int8", "fp8", "int4")
ISA_VARIABLE = "RIDGELINE_NATIVE_ISA"  # forces a kernel variant: attention_isa.h names them


class NativeAttention:
    """Paged attention on the CPU in float32."""

    has_groups = True  # takes the block tables of every group of layers by itself

    def __init__(self, spec: ModelSpec, cache: KvCache) -> None:
        self.attentions = tuple(layer.attention for layer in spec.layers)
        self.cache, self.num_full = cache, int(bool(cache.layout.full))
        self.groups = tuple(map(cache.layout.group_of, range(len(spec.layers))))
        self.paged_kv = tuple(
            _paged_kv(kv_N2KBW, cache.format.name, attention.head_dim)
            if attention.delta is None
            else None
            for kv_N2KBW, attention in zip(cache.layers, self.attentions, strict=True)
        )
        self.isa = os.environ.get(ISA_VARIABLE, "auto")

    @staticmethod
    def why_not(site: AttentionSite) -> tuple[str, ...]:
        reasons = []
        if site.device.type != "cpu":
            reasons.append(f"runs on the CPU only, not on {site.device.type}")
        if site.dtype != torch.float32:
            reasons.append(f"computes in float32 only, not in {site.dtype}")
        if site.kv_dtype not in KV_FORMATS:
            reasons.append(f"reads a KV cache of {', '.join(KV_FORMATS)}, not {site.kv_dtype}")
        if site.kv_dtype == "int4" and site.block_size != KV_GROUP:
            reasons.append(f"reads INT4 in blocks of {KV_GROUP} tokens only")
        if site.has_chunk:
            reasons.append("has no kernel for attention within chunks")
        if site.has_latent:
            reasons.append("has no kernel for latent attention")
        if max(site.head_dims) > MAX_HEAD_DIM:
            reasons.append(f"head_dim {max(site.head_dims)} > {MAX_HEAD_DIM}")
        return tuple(reasons)

    def place(self, layer: int) -> _native.PagedKv:
        """Keys and values of a layer that has them."""
        place = self.paged_kv[layer]
        assert place is not None, "a layer without keys"
        return place

    def prepare(self, runs: Sequence[Run]) -> NativeStep:
        return NativeStep(self, self.plans(runs))

    def plans(self, runs: Sequence[Run]) -> tuple[_native.AttentionPlan, ...]:
        """The step's runs as the kernels take them, checked against the cache.

        One plan for each group of layers with separate block tables (`KvLayout`).
        """
        cache = self.cache
        runs = stored_runs(runs, cache.block_size)
        sizes = (cache.num_blocks, cache.block_size)
        plans = []
        if self.num_full:
            placed = [(run.start, len(run.tokens), run.blocks) for run in runs]
            plans.append(_native.AttentionPlan(placed, *sizes))
        for j in range(len(cache.layout.windowed)):
            windowed = [
                (run.start, len(run.tokens), run.windows[j], run.first_place) for run in runs
            ]
            plans.append(_native.AttentionPlan(windowed, *sizes))
        return tuple(plans)


class NativeStep:
    """One step of `NativeAttention`; `plans` are checked once and shared by the layers.

    Native layers do not call it: attention is then part of their segment, with the same plans.
    """

    def __init__(self, owner: NativeAttention, plans: tuple[_native.AttentionPlan, ...]) -> None:
        self.owner, self.plans = owner, plans

    def __call__(
        self, q_THD: Tensor, kv_T2KD: Tensor, layer: int, sinks_H: Tensor | None = None
    ) -> Tensor:
        owner, attention = self.owner, self.owner.attentions[layer]
        plan = self.plans[owner.groups[layer]]
        _check(q_THD, plan.num_rows, attention.num_heads, attention.head_dim)
        _check(kv_T2KD, plan.num_rows, 2, attention.num_kv_heads, attention.head_dim)
        place, (row, kind, head, _) = owner.place(layer), kv_T2KD.stride()
        _native.write_kv(plan, place, kv_T2KD.data_ptr(), row, kind, head, owner.isa)
        out_THD = torch.empty(q_THD.shape, dtype=torch.float32)
        _native.attend(
            plan,
            place,
            q_THD.data_ptr(),
            q_THD.stride(0),
            q_THD.stride(1),
            attention.num_heads,
            out_THD.data_ptr(),
            attention.scale,
            attention.window or 0,
            attention.softcap or 0.0,
            torch.get_num_threads(),
            owner.isa,
            **sinks_argument(sinks_H),
        )
        return out_THD


def _paged_kv(kv_N2KBW: Tensor, kind: str, head_dim: int) -> _native.PagedKv:
    """Addresses and strides of a layer's keys and values, checked against its memory."""
    num_blocks, _, num_kv_heads, block_size, width = kv_N2KBW.shape
    size = kv_N2KBW.element_size()
    strides = [stride * size for stride in kv_N2KBW.stride()]
    stride_block, stride_kind, stride_head, stride_token, _ = strides
    assert stride_token == width * size, "the rows of a tile must be contiguous"
    start, block = kv_N2KBW.data_ptr(), kv_N2KBW[0]
    return _native.PagedKv(
        k=start,
        v=start + stride_kind,
        kind=kind,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        stride_block=stride_block,
        stride_head=stride_head,
        num_bytes=(num_blocks - 1) * stride_block + block.nbytes - stride_kind,
    )


def sinks_argument(sinks_H: Tensor | None) -> dict[str, int]:
    """The kernels' argument for a layer's sinks, whose memory must outlive the call."""
    if sinks_H is None:
        return {}
    _check(sinks_H, sinks_H.numel())
    return {"sinks": sinks_H.data_ptr()}


def _check(tensor: Tensor, *shape: int) -> None:
    """The kernel reads raw memory, so the tensor must be exactly as expected."""
    assert tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    assert tuple(tensor.shape) == shape and tensor.stride(-1) == 1
