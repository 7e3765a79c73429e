"""Layers with fused operators between the products, for GPUs.

What. A decode step on a GPU is bound by the bytes of its weights, and by the time between its
kernels. A layer of plain torch operators launches some thirty; here it is ten: four products, the
rotation with the store to the cache, attention (a kernel and its reduction), and three fused
operators. The sum of a branch and the norm that follows it are one pass over memory.

`TritonForward` uses Ridgeline's kernels; `CompiledForward` lets Inductor generate the fused
operators (`torch.compile`), for comparison and as the fallback without them. The products are those
of the linears' own formats.

Invariant. That of the family: the states equal those of `TorchForward` up to rounding.

When it loses. Models with other norms, gates or residual paths than Llama's run as plain torch
operators; `why_not` says which.

Shape legend: T tokens of the step, C hidden_size, H query heads, K key heads, D head_dim.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TypeGuard, cast

import torch
from torch import Tensor

from ridgeline.engine.attention.base import Attend
from ridgeline.engine.attention.tables import TableStep
from ridgeline.engine.attention.triton import TritonKernels, why_no_triton
from ridgeline.engine.kernels.pointwise import PointwiseOps, compiled_ops, triton_ops
from ridgeline.engine.kernels.scaled_products import lacks_instructions
from ridgeline.engine.kernels.triton import load
from ridgeline.engine.model.base import DecoderBody
from ridgeline.engine.model.layers import Block, GatedMlp, RmsNorm, attention_of, no_qk_norm
from ridgeline.engine.quant.base import Linear
from ridgeline.engine.quant.scaled import ScaledLinear
from ridgeline.modelspec.format import Format
from ridgeline.modelspec.layer_inputs import why_torch_only
from ridgeline.modelspec.model import ModelSpec


@dataclass(frozen=True)
class FusedLayer:
    """The parts of one block."""

    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    norm_qk: Callable[[Tensor], None]
    sinks: tuple[Tensor, ...]
    attention_gain_C: Tensor
    mlp_gain_C: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: int

    @staticmethod
    def of(block: Block) -> FusedLayer:
        """The parts of a block that `why_not` accepts."""
        attention, mlp = attention_of(block.attention), block.mlp
        assert isinstance(mlp, GatedMlp)
        return FusedLayer(
            attention.qkv,
            attention.o,
            mlp.gate_up,
            mlp.down,
            attention.norm_qk,
            attention.sinks,
            _gain(block.attention_norm),
            _gain(block.mlp_norm),
            attention.num_heads,
            attention.num_kv_heads,
            attention.head_dim,
            block.rope,
        )


def _gain(norm: object) -> Tensor:
    assert type(norm) is RmsNorm
    return norm.gain_C


Rows = Tensor | tuple[Tensor, Tensor]
"""Rows in the compute dtype, or 8-bit rows and their scales for the product that reads them."""


def multiply(linear: Linear, rows: Rows) -> Tensor:
    """The product of rows that were made for this linear."""
    if isinstance(rows, Tensor):
        return linear(rows)
    assert isinstance(linear, ScaledLinear)
    return linear.multiply_rounded(*rows)


class RowOps:
    """Operators that round their result where the linear that reads it multiplies 8-bit rows."""

    def __init__(self, ops: PointwiseOps) -> None:
        self.plain, self.rounded = ops, ops.rounded

    def first_norm(self, x_TC: Tensor, gain_C: Tensor, eps: float, reader: Linear) -> Rows:
        if self.rounded is None or not reads_rounded(reader):
            return self.plain.rms_norm(x_TC, gain_C, eps)
        return self.rounded.rms_norm(x_TC, gain_C, eps, reader.kind)

    def add_norm(
        self, x_TC: Tensor, y_TC: Tensor, gain_C: Tensor, eps: float, reader: Linear | None
    ) -> tuple[Tensor, Rows]:
        if self.rounded is None or not reads_rounded(reader):
            return self.plain.add_rms_norm(x_TC, y_TC, gain_C, eps)
        sum_TC, *rows = self.rounded.add_rms_norm(x_TC, y_TC, gain_C, eps, reader.kind)
        return sum_TC, (rows[0], rows[1])

    def gate(self, gate_up_T2I: Tensor, reader: Linear) -> Rows:
        if self.rounded is None or not reads_rounded(reader):
            return self.plain.silu_mul(gate_up_T2I)
        return self.rounded.silu_mul(gate_up_T2I, reader.kind)


def reads_rounded(reader: Linear | None) -> TypeGuard[ScaledLinear]:
    """Whether a linear multiplies 8-bit rows that the device's kernels can make."""
    return isinstance(reader, ScaledLinear) and not lacks_instructions(
        reader.q_OI.device, reader.kind
    )


class FusedForward:
    """A Llama-like decoder around one set of fused operators."""

    def __init__(self, body: DecoderBody, ops: PointwiseOps) -> None:
        self.body, self.pointwise, self.eps = body, ops, body.spec.norm_eps
        self.ops = RowOps(ops)
        self.layers = tuple(map(FusedLayer.of, body.blocks))
        # The norm at the end of a layer is the first of the next one, or the last of all.
        later = [(layer.qkv, layer.attention_gain_C) for layer in self.layers[1:]]
        self.next_norms: tuple[tuple[Linear | None, Tensor], ...] = (
            *later,
            (None, _gain(body.norm)),
        )

    @staticmethod
    def storage_format(format: Format) -> Format:
        """Weights are kept as they are."""
        return format

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, end: int, attend: Attend) -> Tensor:
        body, ops, eps = self.body, self.ops, self.eps
        x_TC = body.table.rows(tokens_T).to(body.dtype)
        if body.embed_scale != 1.0:
            x_TC = x_TC * body.embed_scale
        rotations = body.ropes.at(positions_T, end)
        rows = ops.first_norm(x_TC, self.layers[0].attention_gain_C, eps, self.layers[0].qkv)
        for index, layer in enumerate(self.layers):
            o_TX = self._attention(rows, layer, rotations[layer.rope], attend, index)
            x_TC, rows = ops.add_norm(x_TC, layer.o(o_TX), layer.mlp_gain_C, eps, layer.gate_up)
            y_TC = multiply(layer.down, ops.gate(multiply(layer.gate_up, rows), layer.down))
            reader, gain_C = self.next_norms[index]
            x_TC, rows = ops.add_norm(x_TC, y_TC, gain_C, eps, reader)
        assert isinstance(rows, Tensor)
        return rows

    def _attention(
        self,
        rows: Rows,
        layer: FusedLayer,
        rotation: tuple[Tensor, Tensor],
        attend: Attend,
        index: int,
    ) -> Tensor:
        """Attention's input to the output projection, [T, H · D]."""
        num_heads, num_keys = layer.num_heads, layer.num_kv_heads
        heads_TXD = multiply(layer.qkv, rows).view(-1, num_heads + 2 * num_keys, layer.head_dim)
        qk_TXD = heads_TXD[:, : num_heads + num_keys]
        if layer.norm_qk is not no_qk_norm:
            layer.norm_qk(qk_TXD)
        q_THD = heads_TXD[:, :num_heads]
        kv_T2KD = heads_TXD[:, num_heads:].view(-1, 2, num_keys, layer.head_dim)
        if self._stores(attend):
            assert isinstance(attend, TableStep)
            self._rope_store(heads_TXD, layer, rotation, attend, index)
            o_THD = attend.attend_stored(q_THD, kv_T2KD, index, *layer.sinks)
        else:
            self.pointwise.rotate(qk_TXD, *rotation)
            o_THD = attend(q_THD, kv_T2KD, index, *layer.sinks)
        return o_THD.reshape(-1, num_heads * layer.head_dim)

    def _stores(self, attend: Attend) -> bool:
        """Whether the rotation may store keys and values itself."""
        return False

    def _rope_store(
        self,
        heads_TXD: Tensor,
        layer: FusedLayer,
        rotation: tuple[Tensor, Tensor],
        attend: TableStep,
        index: int,
    ) -> None:
        raise AssertionError("_stores is False")


class TritonForward(FusedForward):
    """Fused layers with Ridgeline's Triton kernels."""

    def __init__(self, body: DecoderBody) -> None:
        super().__init__(body, triton_ops())

    @staticmethod
    def why_not(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Sequence[str]:
        return (*why_no_triton(device), *why_not_fused(spec, dtype))

    def _stores(self, attend: Attend) -> bool:
        return isinstance(attend, TableStep) and isinstance(attend.kernels, TritonKernels)

    def _rope_store(
        self,
        heads_TXD: Tensor,
        layer: FusedLayer,
        rotation: tuple[Tensor, Tensor],
        attend: TableStep,
        index: int,
    ) -> None:
        cos_T1R, sin_T1R = rotation
        load("rope_store").rope_store(
            heads_TXD,
            cos_T1R.squeeze(1),
            sin_T1R.squeeze(1),
            cast(TritonKernels, attend.kernels).layers[index],
            attend.slots_T,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
        )


class CompiledForward(FusedForward):
    """Fused layers with operators that Inductor generates (`torch.compile`, any row count)."""

    def __init__(self, body: DecoderBody) -> None:
        super().__init__(body, compiled_ops())

    @staticmethod
    def why_not(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Sequence[str]:
        reasons = list(why_not_fused(spec, dtype))
        if device.type == "cuda" and not find_spec("triton"):
            reasons.append("torch.compile needs the package triton on CUDA")
        if device.type == "cpu" and not any(map(shutil.which, cpp_compilers())):
            reasons.append("torch.compile needs a C++ compiler on the CPU")
        return reasons


def cpp_compilers() -> tuple[str, ...]:
    """The programs that torch.compile may call on a CPU: $CXX, or what it looks for."""
    chosen = os.environ.get("CXX")
    return (chosen,) if chosen else ("g++", "clang++")


def why_not_fused(spec: ModelSpec, dtype: torch.dtype) -> tuple[str, ...]:
    """Reasons why a model's layers are not fused: what differs from Llama's."""
    reasons: dict[str, bool] = {"centred norms": spec.norm_centred}
    reasons["float32 gains of 1 + w"] = spec.norm_plus_one and dtype != torch.float32
    for layer in spec.layers:
        attention, mlp = layer.attention, layer.mlp
        special = attention.latent is not None or attention.delta is not None or attention.gated
        rope = attention.rope
        for reason, holds in {
            "norms elsewhere than before each branch": layer.norms != "before" or layer.parallel,
            "scaled residuals": layer.residual_scale != 1.0,
            "latent, linear or gated attention": special,
            "interleaved or absent rotations": rope.interleaved or not rope.dim,
            "queries scaled by position": rope.query_floor is not None,
            "experts": mlp.router is not None,
            "a gate other than SiLU": not mlp.gated or mlp.activation != "silu",
        }.items():
            reasons[reason] = reasons.get(reason, False) or holds
    reasons["a model whose " + why_torch_only(spec)] = why_torch_only(spec) != ""
    return tuple(f"does not fuse {reason}" for reason, holds in reasons.items() if holds)
