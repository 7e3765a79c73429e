"""The parts of a decoder block: norms, attention, gated feed-forward. Inference only, no autograd.

Each is chosen once, at construction (`NoNorm` where a model has none, `ConcatLinear` where q, k and v
cannot be one product), so that the forward pass has no branch on the model.

Shape legend: T tokens, C hidden_size, H query heads, K key heads, D head_dim, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.attention.base import Attend
from ridgeline.engine.model.rope import rotate_
from ridgeline.engine.quant.base import Linear
from ridgeline.modelspec.model import AttentionSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
Norm = Callable[[Tensor], Tensor]


class RmsNorm:
    """x / rms(x) · gain over the last axis, computed in float32."""

    __slots__ = ("eps", "gain_C", "shape")

    def __init__(self, gain_C: Tensor, eps: float) -> None:
        self.gain_C, self.eps, self.shape = gain_C, eps, tuple(gain_C.shape)

    def __call__(self, x_TC: Tensor) -> Tensor:
        return F.rms_norm(x_TC, self.shape, self.gain_C, self.eps)


class WideRmsNorm(RmsNorm):
    """RMSNorm with a float32 gain applied before rounding, as a gain of 1 + w needs below float32."""

    __slots__ = ()

    def __call__(self, x_TC: Tensor) -> Tensor:
        return F.rms_norm(x_TC.float(), self.shape, self.gain_C, self.eps).to(x_TC.dtype)


def make_norm(weight_C: Tensor, eps: float, plus_one: bool, dtype: torch.dtype) -> RmsNorm:
    """RMSNorm with gain w, or 1 + w if the checkpoint stores it that way (Gemma)."""
    gain = weight_C.float() + 1.0 if plus_one else weight_C
    if plus_one and dtype != torch.float32:
        return WideRmsNorm(gain, eps)
    return RmsNorm(gain.to(dtype), eps)


def no_norm(x_TC: Tensor) -> Tensor:
    """The identity, for blocks that do not normalise the outputs of their branches."""
    return x_TC


class QkNorm:
    """RMS-normalises each head of q and k in place before the rotation (Qwen3, Gemma 3)."""

    __slots__ = ("eps", "gain_XD")

    def __init__(self, spec: AttentionSpec, q_gain_D: Tensor, k_gain_D: Tensor, eps: float) -> None:
        heads = [q_gain_D] * spec.num_heads + [k_gain_D] * spec.num_kv_heads
        self.gain_XD, self.eps = torch.stack(heads), eps

    def __call__(self, qk_TXD: Tensor) -> None:
        wide = qk_TXD.to(self.gain_XD.dtype)
        normed = F.rms_norm(wide, (qk_TXD.shape[-1],), None, self.eps)
        qk_TXD.copy_(normed.mul_(self.gain_XD))


def no_qk_norm(qk_TXD: Tensor) -> None:
    """Does nothing, for models that do not normalise heads."""


class ConcatLinear:
    """Several linears of one input with different formats or biases; concatenates their outputs."""

    __slots__ = ("linears",)

    def __init__(self, linears: Sequence[Linear]) -> None:
        self.linears = tuple(linears)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return torch.cat([linear(x_TI) for linear in self.linears], dim=-1)

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in self.linears)


class AttentionLayer:
    """q, k, v in one product, norm and rotation in place, the step's attention, output projection."""

    __slots__ = ("head_dim", "norm_qk", "num_heads", "num_kv_heads", "o", "qkv")

    def __init__(
        self, spec: AttentionSpec, qkv: Linear, o: Linear, norm_qk: Callable[[Tensor], None]
    ) -> None:
        self.qkv, self.o, self.norm_qk = qkv, o, norm_qk
        self.num_heads, self.num_kv_heads = spec.num_heads, spec.num_kv_heads
        self.head_dim = spec.head_dim

    def __call__(
        self, x_TC: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, layer: int
    ) -> Tensor:
        num_queries, num_keys = self.num_heads, self.num_kv_heads
        heads_TXD = self.qkv(x_TC).view(-1, num_queries + 2 * num_keys, self.head_dim)
        qk_TXD = heads_TXD[:, : num_queries + num_keys]
        self.norm_qk(qk_TXD)
        rotate_(qk_TXD, *rotation)
        kv_T2KD = heads_TXD[:, num_queries:].view(-1, 2, num_keys, self.head_dim)
        o_THD = attend(heads_TXD[:, :num_queries], kv_T2KD, layer)
        return self.o(o_THD.reshape(-1, num_queries * self.head_dim))


class GatedMlp:
    """down(act(gate(x)) · up(x)), gate and up in one product."""

    __slots__ = ("act", "activation", "down", "gate_up")

    def __init__(self, activation: str, gate_up: Linear, down: Linear) -> None:
        self.activation, self.act = activation, ACTIVATIONS[activation]
        self.gate_up, self.down = gate_up, down

    def __call__(self, x_TC: Tensor) -> Tensor:
        gate_TI, up_TI = self.gate_up(x_TC).chunk(2, dim=-1)
        return self.down(self.act(gate_TI).mul_(up_TI))


class Block:
    """x + attention(norm(x)), then x + mlp(norm(x)); branch outputs may be normalised as well."""

    __slots__ = ("attention", "attention_norm", "branch_norms", "mlp", "mlp_norm", "rope")

    def __init__(
        self,
        attention: AttentionLayer,
        mlp: Callable[[Tensor], Tensor],
        norms: tuple[Norm, Norm],
        branch_norms: tuple[Norm, Norm],
        rope: int,
    ) -> None:
        self.attention, self.mlp, self.rope = attention, mlp, rope
        self.attention_norm, self.mlp_norm = norms
        self.branch_norms = branch_norms

    def __call__(
        self,
        x_TC: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        attend: Attend,
        layer: int,
    ) -> Tensor:
        return self.feed_forward(self.attend(x_TC, rotations, attend, layer))

    def attend(
        self,
        x_TC: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        attend: Attend,
        layer: int,
    ) -> Tensor:
        """The first half: x + attention(norm(x))."""
        y_TC = self.attention(self.attention_norm(x_TC), rotations[self.rope], attend, layer)
        return x_TC + self.branch_norms[0](y_TC)

    def feed_forward(self, x_TC: Tensor) -> Tensor:
        """The second half: x + mlp(norm(x))."""
        return x_TC + self.branch_norms[1](self.mlp(self.mlp_norm(x_TC)))
