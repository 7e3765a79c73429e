"""Layers that have separate inputs, and layers that carry several hidden states.

    token ──▶ row of a table, one part per layer ─┐
    embedding ──▶ projection, norm ──────────────┴─▶ layer input p

    layer     y = block(x);  y + norm(up(act(gate(y)) · p))                      (Gemma 4)
    AltUp     ŷ = mixtures of x;  y = block(ŷ_a);  each ŷ_i is corrected by y - ŷ_a    (Gemma 3n)

Papers: AltUp (arXiv:2301.13310), LAuReL (arXiv:2411.07501). When it loses: mixtures, gates and
their norms are two dozen small operators per layer, and only the torch layers have them.

Shape legend: T tokens, C hidden_size, L layers, P size of a layer input, N hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ridgeline.engine.attention.base import Attend
from ridgeline.engine.model.layers import ACTIVATIONS, Block, GatedMlp, Norm
from ridgeline.engine.model.shared_kv import StepMemory
from ridgeline.engine.model.table import EmbeddingTable
from ridgeline.engine.quant.base import Linear

SMALLEST_SQUARE = 1e-5
"""Least mean square of a state that is scaled to the magnitude of another."""


class SparseGatedMlp(GatedMlp):
    """A gate keeps what exceeds the quantile `sparsity` of a normal distribution fitted to it."""

    __slots__ = ("act", "deviations")

    def __init__(self, activation: str, gate_up: Linear, down: Linear, sparsity: float) -> None:
        super().__init__(activation, gate_up, down)
        self.act = ACTIVATIONS[activation]
        self.deviations = math.sqrt(2) * torch.erfinv(torch.tensor(2 * sparsity - 1)).item()

    def __call__(self, x_TC: Tensor) -> Tensor:
        gate_TI, up_TI = self.gate_up(x_TC).chunk(2, dim=-1)
        deviation_T1 = gate_TI.std(-1, keepdim=True, unbiased=False)
        cutoff_T1 = gate_TI.mean(-1, keepdim=True) + self.deviations * deviation_T1
        return self.down(self.act(torch.relu(gate_TI - cutoff_T1)) * up_TI)


class InputGate:
    """norm(up(act(gate(x)) · p)): the part of a layer that reads its input p."""

    __slots__ = ("act", "gate", "norm", "up")

    def __init__(
        self, act: Callable[[Tensor], Tensor], gate: Linear, up: Linear, norm: Norm
    ) -> None:
        self.act, self.gate, self.up, self.norm = act, gate, up, norm

    def __call__(self, x_TC: Tensor, attend: Attend, layer: int) -> Tensor:
        inputs_TP = cast(StepMemory, attend).inputs_LTP[layer]
        return self.norm(self.up(self.act(self.gate(x_TC)) * inputs_TP))


class ExtendedBlock(Block):
    """The parts of a block, for a layer that does more with them."""

    __slots__ = ()

    def __init__(self, block: Block) -> None:
        norms = (block.attention_norm, block.mlp_norm)
        super().__init__(block.attention, block.mlp, norms, block.branch_norms, block.rope)


class InputBlock(ExtendedBlock):
    """A block, then its input added through a gate, then a learned scale of the whole."""

    __slots__ = ("input_gate", "scale")

    def __init__(self, block: Block, input_gate: InputGate | None, scale: float) -> None:
        super().__init__(block)
        self.input_gate, self.scale = input_gate, scale

    def __call__(
        self,
        x_TC: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        attend: Attend,
        layer: int,
    ) -> Tensor:
        x_TC = super().__call__(x_TC, rotations, attend, layer)
        if self.input_gate is not None:
            x_TC = x_TC + self.input_gate(x_TC, attend, layer)
        return x_TC * self.scale


@dataclass(frozen=True)
class AltUpWeights:
    """How a layer mixes its hidden states, and the low-rank branch parallel to attention."""

    active: int
    router_norm: Norm
    router_NC: Tensor
    prediction_XN: Tensor
    correction_NN: Tensor
    active_gain_C: Tensor | None
    laurel_down: Linear
    laurel_up: Linear
    laurel_norm: Norm

    def mixture(self, x_TC: Tensor) -> Tensor:
        """How much of each state a row asks for, [T, N]."""
        routed_TN = (self.router_norm(x_TC) / x_TC.shape[-1]) @ self.router_NC.T
        return torch.tanh(routed_TN.float()).to(x_TC.dtype)

    def predict(self, x_NTC: Tensor) -> Tensor:
        """The states as the layer expects to leave them."""
        num = len(x_NTC)
        coefs_TX = self.mixture(x_NTC[self.active]) @ self.prediction_XN.T
        coefs_TNN = coefs_TX.view(-1, num, num).transpose(1, 2)
        return (x_NTC.permute(1, 2, 0) @ coefs_TNN).permute(2, 0, 1) + x_NTC

    def correct(self, predicted_NTC: Tensor, active_TC: Tensor) -> Tensor:
        """Adds to each state its share of what the computed one differs from its prediction."""
        coefs_TN = self.mixture(active_TC) @ self.correction_NN.T + 1.0
        return predicted_NTC + (active_TC - predicted_NTC[self.active]) * coefs_TN.T[:, :, None]


class AltUpBlock(ExtendedBlock):
    """A block on one of several hidden states x_NTC."""

    __slots__ = ("altup", "input_gate")

    def __init__(self, block: Block, input_gate: InputGate, altup: AltUpWeights) -> None:
        super().__init__(block)
        self.input_gate, self.altup = input_gate, altup

    def __call__(
        self,
        x_TC: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        attend: Attend,
        layer: int,
    ) -> Tensor:
        altup = self.altup
        predicted_NTC = altup.predict(x_TC)
        active_TC = predicted_NTC[altup.active]
        normed_TC = self.attention_norm(active_TC)
        laurel_TC = normed_TC + altup.laurel_norm(altup.laurel_up(altup.laurel_down(normed_TC)))
        y_TC = self.branch_norms[0](self.attention(normed_TC, rotations[self.rope], attend, layer))
        active_TC = self.feed_forward((active_TC + y_TC + laurel_TC) / math.sqrt(2))
        corrected_NTC = altup.correct(predicted_NTC, active_TC)
        first_TC = corrected_NTC[altup.active]
        if altup.active_gain_C is not None:
            first_TC = first_TC * altup.active_gain_C
        corrected_NTC[1:] += self.input_gate(first_TC, attend, layer)
        return corrected_NTC


class LayerInputs:
    """Makes the layer inputs of a step from tokens and their embeddings."""

    def __init__(
        self, table: EmbeddingTable, scale: float, projection: Linear, norm: Norm, size: int
    ) -> None:
        self.table, self.scale, self.projection = table, scale, projection
        self.norm, self.size = norm, size

    def __call__(self, tokens_T: Tensor, x_TC: Tensor, num_rows: int) -> tuple[Tensor, ...]:
        """inputs_TP of every layer. Tokens beyond the table's `num_rows` have those of token 0."""
        tokens_T = torch.where(tokens_T < num_rows, tokens_T, 0)
        rows_TLP = (self.table.rows(tokens_T).to(x_TC.dtype) * self.scale).view(
            len(tokens_T), -1, self.size
        )
        projected_TX = self.projection(x_TC) * x_TC.shape[-1] ** -0.5
        inputs_TLP = self.norm(projected_TX.view(rows_TLP.shape)) + rows_TLP
        return tuple((inputs_TLP * 2.0**-0.5)[:, i] for i in range(inputs_TLP.shape[1]))


class HiddenStreams:
    """Makes several hidden states of one, and one of several, of the same magnitude."""

    def __init__(self, spread: Sequence[Linear], join: Sequence[Linear]) -> None:
        self.spread_linears, self.join_linears = tuple(spread), tuple(join)

    def spread(self, x_TC: Tensor) -> Tensor:
        """x_NTC: the embeddings and projections of them."""
        others = [_scaled_like(linear(x_TC), x_TC) for linear in self.spread_linears]
        return torch.stack([x_TC, *others])

    def join(self, x_NTC: Tensor) -> Tensor:
        """The mean of the first state and projections of the others."""
        pairs = zip(self.join_linears, x_NTC[1:], strict=True)
        others = [_scaled_like(linear(x_TC), x_NTC[0]) for linear, x_TC in pairs]
        return torch.stack([x_NTC[0], *others]).mean(0)


def _scaled_like(x_TC: Tensor, like_TC: Tensor) -> Tensor:
    """Rows of x with the root mean square of those of `like`."""
    target_T1 = like_TC.square().mean(-1, keepdim=True) ** 0.5
    own_T1 = x_TC.square().mean(-1, keepdim=True).clamp(min=SMALLEST_SQUARE).sqrt()
    return x_TC * target_T1 / own_T1
