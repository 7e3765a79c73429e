"""Attention over a cache in INT4 by the CPU kernel (native/attention/int4/kernel.h).

What. What `Int4Attention` computes, from the codes as they are stored: products of 4-bit codes with
queries and weights of 16 bits run on integers. New rows are stored, and whole groups coded, before
attention, as there.

Paper. KIVI (Liu et al. 2024, arXiv 2402.02750).

Invariant. A row's result is bitwise the same whatever it is batched with, however its prompt was
chunked, and on any number of threads.

When it loses. Prompts: eight rows at a time share the codes that they read, where INT8 widens a
tile once for many.

Shape legend: T new tokens, H query heads, K key heads, D head_dim, M groups.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

import ridgeline._native as _native
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.int4.attention import code_filled, filled_groups
from ridgeline.engine.attention.int4.format import Int4Kv
from ridgeline.engine.attention.native import ISA_VARIABLE, sinks_argument
from ridgeline.engine.scheduler.plan import Run
from ridgeline.modelspec.model import ModelSpec


class NativeInt4Attention:
    """Runs on the CPU in float32."""

    def __init__(self, spec: ModelSpec, cache: KvCache) -> None:
        self.attentions = tuple(layer.attention for layer in spec.layers)
        self.cache = cache
        layers = range(len(spec.layers))
        self.coded = tuple(self._coded_place(layer) for layer in layers)
        self.recent = tuple(self._recent_place(layer) for layer in layers)
        self.isa = os.environ.get(ISA_VARIABLE, "auto")

    def prepare(self, runs: Sequence[Run]) -> NativeInt4Step:
        return NativeInt4Step(self, runs)

    def _coded_place(self, layer: int) -> _native.Int4Kv:
        kv_N2KBW, head_dim = self.cache.layers[layer], self.attentions[layer].head_dim
        block, side, head, _, _ = kv_N2KBW.stride()
        start = kv_N2KBW.data_ptr()
        return _native.Int4Kv(
            k=start,
            v=start + side,
            num_blocks=len(kv_N2KBW),
            num_kv_heads=kv_N2KBW.shape[2],
            head_dim=head_dim,
            stride_block=block,
            stride_head=head,
            num_bytes=(len(kv_N2KBW) - 1) * block + kv_N2KBW[0].numel() - side,
        )

    def _recent_place(self, layer: int) -> _native.PagedKv:
        memory_NP, format = self.cache.recent[layer][0], self.cache.format
        attention, size = self.attentions[layer], self.cache.block_size
        assert isinstance(format, Int4Kv)
        head = size * format.recent_width(attention.head_dim)
        side = attention.num_kv_heads * head
        return _native.PagedKv(
            k=memory_NP.data_ptr(),
            v=memory_NP.data_ptr() + side,
            kind="int8",
            num_blocks=len(memory_NP),
            block_size=size,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            stride_block=memory_NP.stride(0),
            stride_head=head,
            num_bytes=memory_NP.nbytes - side,
        )


class NativeInt4Step:
    """One step of `NativeInt4Attention`; plans are checked once and shared by the layers."""

    def __init__(self, owner: NativeInt4Attention, runs: Sequence[Run]) -> None:
        self.owner = owner
        sizes = (owner.cache.num_blocks, owner.cache.block_size)
        self.plans: list[_native.AttentionPlan | None] = []
        for group in range(2):
            held = all(group < len(run.windows) for run in runs)
            placed = (
                [(run.start, len(run.tokens), run.windows[group], run.first_place) for run in runs]
                if held
                else []
            )
            self.plans.append(_native.AttentionPlan(placed, *sizes) if held else None)
        self.tables = _native.Int4Tables([run.blocks for run in runs], owner.cache.num_blocks)
        self.filled = [filled_groups(runs, group, owner.cache.block_size) for group in range(2)]

    def __call__(
        self, q_THD: Tensor, kv_T2KD: Tensor, layer: int, sinks_H: Tensor | None = None
    ) -> Tensor:
        owner, attention = self.owner, self.owner.attentions[layer]
        group = owner.cache.recent[layer][1]
        plan, recent = self.plans[group], owner.recent[layer]
        assert plan is not None, "a layer without blocks for recent rows"
        shapes = (q_THD.shape, kv_T2KD.shape)
        expected = (
            (plan.num_rows, attention.num_heads, attention.head_dim),
            (plan.num_rows, 2, attention.num_kv_heads, attention.head_dim),
        )
        assert shapes == expected and q_THD.stride(-1) == kv_T2KD.stride(-1) == 1
        assert q_THD.dtype == kv_T2KD.dtype == torch.float32
        row, kind, head, _ = kv_T2KD.stride()
        _native.write_kv(plan, recent, kv_T2KD.data_ptr(), row, kind, head, owner.isa)
        code_filled(owner.cache, attention, layer, self.filled[group])
        out_THD = torch.empty(q_THD.shape, dtype=torch.float32)
        _native.attend_int4(
            plan,
            recent,
            self.tables,
            owner.coded[layer],
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
