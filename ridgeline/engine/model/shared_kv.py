"""Attention with normalised values, and layers that read the KV cache of an earlier layer.

A layer that shares a cache computes queries alone. It attends as the layer that keeps the cache,
with the keys and values that this layer had computed in the same step, so that every attention
backend serves it unchanged: the rows are written once more, with the same bits.

Shape legend: T tokens, H query heads, K key heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.attention.base import Attend
from ridgeline.engine.model.layers import QkNorm, rotation_of
from ridgeline.engine.quant.base import Linear
from ridgeline.modelspec.model import AttentionSpec


class StepMemory:
    """The `Attend` of one step, which remembers the new keys and values of every layer.

    `inputs_LTP` are the step's layer inputs (empty where layers have none).
    """

    def __init__(self, attend: Attend, inputs_LTP: tuple[Tensor, ...] = ()) -> None:
        self.attend, self.inputs_LTP = attend, inputs_LTP
        self.kv_by_layer: dict[int, Tensor] = {}

    def __call__(
        self, q_THD: Tensor, kv_T2KD: Tensor, layer: int, sinks_H: Tensor | None = None
    ) -> Tensor:
        self.kv_by_layer[layer] = kv_T2KD
        return self.attend(q_THD, kv_T2KD, layer, sinks_H)

    def reuse(self, q_THD: Tensor, layer: int) -> Tensor:
        """Attention over the cache of `layer`, which this step has already computed."""
        return self.attend(q_THD, self.kv_by_layer[layer], layer)


class NormedValueAttention:
    """Attention whose values are RMS-normalised without a gain, and may be the projected keys."""

    __slots__ = ("eps", "norm_qk", "o", "qkv", "rotate", "shape", "v_is_k")

    def __init__(
        self,
        spec: AttentionSpec,
        qkv: Linear,
        o: Linear,
        norm_qk: Callable[[Tensor], None],
        eps: float,
    ) -> None:
        self.qkv, self.o, self.norm_qk, self.eps = qkv, o, norm_qk, eps
        self.shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.v_is_k, self.rotate = spec.v_is_k, rotation_of(spec)

    def __call__(
        self, x_TC: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, layer: int
    ) -> Tensor:
        num_heads, num_keys, head_dim = self.shape
        heads_TXD = self.qkv(x_TC).view(len(x_TC), -1, head_dim)
        # before the norm of keys, which is in place
        v_TKD = F.rms_norm(heads_TXD[:, -num_keys:], (head_dim,), None, self.eps)
        qk_TXD = heads_TXD[:, : num_heads + num_keys]
        self.norm_qk(qk_TXD)
        self.rotate(qk_TXD, *rotation)
        kv_T2KD = torch.stack((qk_TXD[:, num_heads:], v_TKD), 1)
        o_THD = attend(qk_TXD[:, :num_heads], kv_T2KD, layer)
        return self.o(o_THD.reshape(len(x_TC), -1))


class SharedKvAttention:
    """Queries of this layer over the cache of layer `source`; its `Attend` is a `StepMemory`."""

    __slots__ = ("norm_q", "o", "q", "rotate", "shape", "source")

    def __init__(
        self, spec: AttentionSpec, q: Linear, o: Linear, norm_q: QkNorm, source: int
    ) -> None:
        self.q, self.o, self.norm_q, self.source = q, o, norm_q, source
        self.shape, self.rotate = (-1, spec.num_heads, spec.head_dim), rotation_of(spec)

    def __call__(
        self, x_TC: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, layer: int
    ) -> Tensor:
        q_THD = self.q(x_TC).view(self.shape)
        self.norm_q(q_THD)
        self.rotate(q_THD, *rotation)
        o_THD = cast(StepMemory, attend).reuse(q_THD, self.source)
        return self.o(o_THD.reshape(len(x_TC), -1))
