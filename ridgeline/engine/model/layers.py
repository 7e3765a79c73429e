"""The parts of a decoder block: norms, attention, gated feed-forward. Inference only, no autograd.

Each is chosen once, at construction (`NoNorm` where a model has none, `ConcatLinear` where q, k and
v cannot be one product), so that the forward pass has no branch on the model.

Shape legend: T tokens, C hidden_size, H query heads, K key heads, D head_dim, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.attention.base import Attend
from ridgeline.engine.attention.latent import LatentAttend, LatentUp
from ridgeline.engine.model.rope import (
    rotate_,
    rotate_alone_,
    rotate_and_scale_queries_,
    rotate_interleaved_,
    rotate_part_,
    rotate_part_and_scale_,
    scale_queries_,
)
from ridgeline.engine.quant.base import Linear
from ridgeline.errors import CannotRun
from ridgeline.modelspec.model import AttentionSpec, ModelSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
Norm = Callable[[Tensor], Tensor]
Gate = Callable[[Tensor, Tensor], Tensor]


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss: both bounded by 7, g · sigmoid(1.702 g) · (u + 1)."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def gate_of(activation: str) -> Gate:
    """The function of gate and up in front of the down projection."""
    if activation == "clamped_swiglu":
        return clamped_swiglu
    act = ACTIVATIONS[activation]
    return lambda gate, up: act(gate).mul_(up)


class Xielu:
    """xIELU (Huang, Schlag 2024, arXiv:2411.13010): quadratic above 0, exponential below.

    α_p x² + β x for x > 0, else α_n (e^min(x, ε) - 1 - x) + β x. The checkpoint stores the inverse
    softplus of α_p and of α_n - β.
    """

    __slots__ = ("alpha_n", "alpha_p", "beta", "eps")

    def __init__(self, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> None:
        self.alpha_p = F.softplus(alpha_p.float()).item()
        self.alpha_n = beta.item() + F.softplus(alpha_n.float()).item()
        self.beta, self.eps = beta.item(), eps.item()

    def __call__(self, x: Tensor) -> Tensor:
        below = (torch.expm1(x.clamp(max=self.eps)) - x) * self.alpha_n
        return torch.where(x > 0, self.alpha_p * x * x, below) + self.beta * x


class RmsNorm:
    """x / rms(x) · gain over the last axis, computed in float32."""

    __slots__ = ("eps", "gain_C", "shape")

    def __init__(self, gain_C: Tensor, eps: float) -> None:
        self.gain_C, self.eps, self.shape = gain_C, eps, tuple(gain_C.shape)

    def __call__(self, x_TC: Tensor) -> Tensor:
        return F.rms_norm(x_TC, self.shape, self.gain_C, self.eps)


class WideRmsNorm(RmsNorm):
    """RMSNorm with a float32 gain applied before rounding, which a gain of 1 + w needs."""

    __slots__ = ()

    def __call__(self, x_TC: Tensor) -> Tensor:
        return F.rms_norm(x_TC.float(), self.shape, self.gain_C, self.eps).to(x_TC.dtype)


class CentredNorm(RmsNorm):
    """LayerNorm without a bias: (x - mean) / std · gain over the last axis."""

    __slots__ = ()

    def __call__(self, x_TC: Tensor) -> Tensor:
        return F.layer_norm(x_TC, self.shape, self.gain_C, None, self.eps)


def make_norm(spec: ModelSpec, weight_C: Tensor, dtype: torch.dtype) -> RmsNorm:
    """The model's norm with gain w, or 1 + w if the checkpoint stores it that way (Gemma)."""
    plus_one, eps = spec.norm_plus_one, spec.norm_eps
    if spec.norm_centred:
        return CentredNorm(weight_C.to(dtype), eps)
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


class QkRowNorm:
    """RMS-normalises q, and k, each as one row over all heads, in place (OLMo 2)."""

    __slots__ = ("eps", "k_gain", "num_heads", "q_gain")

    def __init__(self, spec: AttentionSpec, q_gain: Tensor, k_gain: Tensor, eps: float) -> None:
        self.num_heads, self.eps = spec.num_heads, eps
        self.q_gain = q_gain.view(spec.num_heads, spec.head_dim)
        self.k_gain = k_gain.view(spec.num_kv_heads, spec.head_dim)

    def __call__(self, qk_TXD: Tensor) -> None:
        for part, gain in (
            (qk_TXD[:, : self.num_heads], self.q_gain),
            (qk_TXD[:, self.num_heads :], self.k_gain),
        ):
            part.copy_(F.rms_norm(part.to(gain.dtype), gain.shape, gain, self.eps))


class QkHeadNorm:
    """Subtracts the mean and normalises each head of q and k, with a gain per head (Command R+)."""

    __slots__ = ("eps", "gain_XD")

    def __init__(self, q_gain_HD: Tensor, k_gain_KD: Tensor, eps: float) -> None:
        self.gain_XD, self.eps = torch.cat((q_gain_HD, k_gain_KD)), eps

    def __call__(self, qk_TXD: Tensor) -> None:
        normed = F.layer_norm(qk_TXD, qk_TXD.shape[-1:], None, None, self.eps)
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


def rotation_of(spec: AttentionSpec) -> Callable[..., None]:
    """What happens to heads of q and k in place, given the tables' cos and sin."""
    rotate = rotate_interleaved_ if spec.rope.interleaved else rotate_
    if spec.rope.query_floor is None:
        return rotate
    if not spec.rope.dim:
        return partial(scale_queries_, spec.num_heads)
    return partial(rotate_and_scale_queries_, rotate, spec.num_heads)


def latent_rotations(spec: AttentionSpec) -> tuple[Callable[..., None], Callable[..., None]]:
    """What happens to queries, and to the rotated part of rows, of latent attention in place."""
    rotate = rotate_interleaved_ if spec.rope.interleaved else rotate_
    if spec.rope.query_floor is None:
        return partial(rotate_part_, rotate), rotate
    return partial(rotate_part_and_scale_, rotate), partial(rotate_alone_, rotate)


class AttentionLayer:
    """q, k, v in one product, norm and rotation in place, attention, output projection."""

    __slots__ = ("head_dim", "norm_qk", "num_heads", "num_kv_heads", "o", "qkv", "rotate", "sinks")

    def __init__(
        self,
        spec: AttentionSpec,
        qkv: Linear,
        o: Linear,
        norm_qk: Callable[[Tensor], None],
        sinks_H: Tensor | None = None,
    ) -> None:
        self.sinks: tuple[Tensor, ...] = () if sinks_H is None else (sinks_H,)
        self.qkv, self.o, self.norm_qk = qkv, o, norm_qk
        self.num_heads, self.num_kv_heads = spec.num_heads, spec.num_kv_heads
        self.head_dim = spec.head_dim
        self.rotate: Callable[..., None] = rotation_of(spec)

    def __call__(
        self, x_TC: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, layer: int
    ) -> Tensor:
        num_queries, num_keys = self.num_heads, self.num_kv_heads
        heads_TXD = self.qkv(x_TC).view(-1, num_queries + 2 * num_keys, self.head_dim)
        qk_TXD = heads_TXD[:, : num_queries + num_keys]
        self.norm_qk(qk_TXD)
        self.rotate(qk_TXD, *rotation)
        kv_T2KD = heads_TXD[:, num_queries:].view(-1, 2, num_keys, self.head_dim)
        o_THD = attend(heads_TXD[:, :num_queries], kv_T2KD, layer, *self.sinks)
        return self.o(o_THD.reshape(-1, num_queries * self.head_dim))


class LatentAttention:
    """Attention over latent vectors, normalised and with a rotated part that all heads share.

    `q_down` compresses the input of `q`, or returns it as it is.
    """

    __slots__ = (
        "kv_down",
        "kv_norm",
        "o",
        "q",
        "q_down",
        "rotate_key",
        "rotate_query",
        "shape",
        "up",
    )

    def __init__(
        self,
        spec: AttentionSpec,
        query: tuple[Callable[[Tensor], Tensor], Linear],
        kv_down: Linear,
        kv_norm: Norm,
        up: LatentUp,
        o: Linear,
    ) -> None:
        assert spec.latent is not None
        (self.q_down, self.q), self.kv_down, self.kv_norm = query, kv_down, kv_norm
        self.up, self.o = up, o
        self.shape = (spec.num_heads, spec.head_dim)
        self.rotate_query, self.rotate_key = latent_rotations(spec)

    def __call__(
        self, x_TC: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, layer: int
    ) -> Tensor:
        q_THD = self.q(self.q_down(x_TC)).view(-1, *self.shape)
        rows_TW = self.kv_down(x_TC)
        rows_TW[:, : self.up.rank] = self.kv_norm(rows_TW[:, : self.up.rank])
        self.rotate_query(q_THD, *rotation)
        self.rotate_key(rows_TW[:, None, self.up.rank :], *rotation)
        o_THV = cast(LatentAttend, attend).attend_latent(q_THD, rows_TW, layer, self.up)
        return self.o(o_THV.flatten(1))


class NormedLinear:
    """norm(linear(x))."""

    __slots__ = ("linear", "norm")

    def __init__(self, linear: Linear, norm: Norm) -> None:
        self.linear, self.norm = linear, norm

    def __call__(self, x_TC: Tensor) -> Tensor:
        return self.norm(self.linear(x_TC))


class Mixer(Protocol):
    """The first half of a block: attention, or what stands in its place."""

    def __call__(
        self, x_TC: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, layer: int
    ) -> Tensor: ...


def attention_of(mixer: Mixer) -> AttentionLayer:
    """The mixer of a block whose model has nothing but attention."""
    assert isinstance(mixer, AttentionLayer)
    return mixer


class GatedMlp:
    """down(act(gate(x)) · up(x)), gate and up in one product."""

    __slots__ = ("activation", "down", "gate", "gate_up")

    def __init__(self, activation: str, gate_up: Linear, down: Linear) -> None:
        self.activation, self.gate = activation, gate_of(activation)
        self.gate_up, self.down = gate_up, down

    def __call__(self, x_TC: Tensor) -> Tensor:
        gate_TI, up_TI = self.gate_up(x_TC).chunk(2, dim=-1)
        return self.down(self.gate(gate_TI, up_TI))


class UngatedMlp:
    """down(act(up(x))). `act` is the function named `activation`, with its learned numbers."""

    __slots__ = ("act", "activation", "down", "up")

    def __init__(
        self,
        activation: str,
        up: Linear,
        down: Linear,
        act: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.activation, self.act = activation, act or ACTIVATIONS[activation]
        self.up, self.down = up, down

    def __call__(self, x_TC: Tensor) -> Tensor:
        return self.down(self.act(self.up(x_TC)))


class ScaledBranch:
    """Multiplies a branch's output, normalised before where it is, by a constant."""

    __slots__ = ("factor", "norm")

    def __init__(self, norm: Norm, factor: float) -> None:
        self.norm, self.factor = norm, factor

    def __call__(self, x_TC: Tensor) -> Tensor:
        return self.norm(x_TC) * self.factor


class Block:
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Branch outputs may be normalised and scaled (`branch_norms`); inputs may be left as they are.
    """

    __slots__ = ("attention", "attention_norm", "branch_norms", "mlp", "mlp_norm", "rope")

    def __init__(
        self,
        attention: Mixer,
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


class ParallelBlock(Block):
    """x + attention(norm(x)) + mlp(norm(x)), the same norm of both (Cohere)."""

    __slots__ = ()

    def __call__(
        self,
        x_TC: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        attend: Attend,
        layer: int,
    ) -> Tensor:
        normed_TC = self.attention_norm(x_TC)
        y_TC = self.attention(normed_TC, rotations[self.rope], attend, layer)
        return x_TC + self.branch_norms[0](y_TC) + self.branch_norms[1](self.mlp(normed_TC))

    def attend(
        self,
        x_TC: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        attend: Attend,
        layer: int,
    ) -> Tensor:
        raise CannotRun(
            "calibration runs a block in halves, which parallel blocks do not have",
            fix="quantise without calibration: --method rtn",
        )
