"""QuaRot's offline rotations R1 and R2, merged into the weights (Ashkboos et al., NeurIPS 2024,
arXiv 2404.00456; named as in SpinQuant, arXiv 2405.16406).

An orthogonal R1 rotates the residual stream: embeddings and everything that writes to it get R1 on
their outputs, everything that reads it R1ᵀ on its inputs; RMSNorm commutes with a rotation once its
gain has moved into the readers. R2 rotates each head of v, and o rotates it back. Outlier channels
are spread over all channels, so a group's largest value is closer to the others. R1 and R2 are
randomised Hadamard matrices (of the largest power of two that divides the size, times a random
rotation).

Invariant: the float32 output changes by rounding only (tests: < 1e-5 relative).

When it loses: a tied LM head needs its own table afterwards (it absorbs the last norm's gain).
Models that normalise their branches' outputs (Gemma 2, 3) cannot be rotated: those gains lie
between two places that write to the stream. Models without outliers gain nothing.
"""

from __future__ import annotations

import torch
from msgspec.structs import replace
from torch import Tensor

from ridgeline.engine.checkpoints.sources import PlainWeights, WeightSource
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.errors import CannotRun
from ridgeline.modelspec.model import ModelSpec

_NORM_BEFORE = {
    "q": "attention_norm",
    "k": "attention_norm",
    "v": "attention_norm",
    "gate": "mlp_norm",
    "up": "mlp_norm",
    "router": "mlp_norm",
    "expert_gate": "mlp_norm",
    "expert_up": "mlp_norm",
}
_WRITERS = ("o", "down", "expert_down")


def rotated_spec(spec: ModelSpec) -> ModelSpec:
    """The spec of the rotated model, whose LM head has its own table. Raises CannotRun."""
    if any(layer.norms != "before" for layer in spec.layers):
        raise CannotRun(
            "a model that normalises its branches' outputs cannot be rotated",
            value=spec.family,
            fix="leave out --rotate",
        )
    if spec.norm_centred or any(layer.parallel for layer in spec.layers):
        raise CannotRun(
            "a model whose norms subtract the mean, or with parallel blocks, cannot be rotated",
            value=spec.family,
            fix="leave out --rotate",
        )
    line = "* -> R1, R2: rotated, the same function"
    rewrites = (*spec.rewrites, line)
    return replace(spec, tied_embeddings=False, stored_dtype="float32", rewrites=rewrites)


def rotation(size: int, seed: int) -> Tensor:
    """A random orthogonal matrix [size, size] in float64: Hadamard ⊗ a small one, with random
    signs.
    """
    power = size & -size
    generator = torch.Generator().manual_seed(seed)
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < power:
        hadamard = torch.cat(
            [torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)]
        )
    rest = torch.randn(size // power, size // power, dtype=torch.float64, generator=generator)
    small = torch.linalg.qr(rest)[0]
    signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    return torch.kron(hadamard / power**0.5, small.contiguous()) * signs


class Rotated(PlainWeights):
    """Weights of the rotated model, part by part; a source like any other."""

    def __init__(self, inner: WeightSource, spec: ModelSpec, seed: int) -> None:
        """`spec` is the model's before rotation."""
        self._inner, self._spec = inner, spec
        self._turn_CC = rotation(spec.hidden_size, seed)
        self._head_turn_DD = {
            size: rotation(size, seed + 1)
            for size in {layer.attention.head_dim for layer in spec.layers}
        }

    def get(self, part: Part) -> Tensor:
        key, _, bias = part.key.partition(".")
        if part.key in ("attention_norm", "mlp_norm", "norm"):
            return torch.full(part.shape, 0.0 if self._spec.norm_plus_one else 1.0)
        if part.key == "lm_head":
            tied = part._replace(key="embed") if self._spec.tied_embeddings else part
            gain_C = self._gain("norm", None)
            return ((self._inner.get(tied).double() * gain_C) @ self._turn_CC).float()
        value = self._inner.get(part)
        if key == "embed":
            return (value.double() @ self._turn_CC).float()
        return value if key.endswith("norm") else self._linear(value, part, key, bool(bias))

    def _linear(self, value: Tensor, part: Part, key: str, bias: bool) -> Tensor:
        value = value.double()
        if key in _NORM_BEFORE and not bias:
            value = (value * self._gain(_NORM_BEFORE[key], part.layer)) @ self._turn_CC
        if key == "v":
            value = self._heads(value, part.layer)
        if key == "o" and not bias:
            value = self._heads(value.T, part.layer).T
        if key in _WRITERS:
            value = value @ self._turn_CC if bias else self._turn_CC.T @ value
        return value.float().contiguous()

    def _heads(self, value: Tensor, layer: int | None) -> Tensor:
        """Each head's rows, rotated by R2ᵀ."""
        assert layer is not None
        size = self._spec.layers[layer].attention.head_dim
        heads = value.reshape(-1, size, *value.shape[1:])
        turned = torch.einsum("de,hd...->he...", self._head_turn_DD[size], heads)
        return turned.reshape(value.shape)

    def _gain(self, key: str, layer: int | None) -> Tensor:
        gain = self._inner.get(Part(key, (self._spec.hidden_size,), layer)).double()
        return gain + 1.0 if self._spec.norm_plus_one else gain
