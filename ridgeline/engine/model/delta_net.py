"""The gated delta net layer (Qwen3-Next, Qwen3.5), and attention with a gated output.

Shape legend: T tokens, C hidden_size, S sequences, W width of the convolution, K key size, V value
size, H value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.attention.base import Attend
from ridgeline.engine.attention.states import LayerStates, RunStates, StateAttend
from ridgeline.engine.model.delta_rule import chunked, recurrent, recurrent_into
from ridgeline.engine.model.layers import AttentionLayer
from ridgeline.engine.quant.base import Linear
from ridgeline.modelspec.model import AttentionSpec, DeltaSpec


class GatedAttentionLayer(AttentionLayer):
    """Attention whose output is multiplied by the sigmoid of a gate, which `q` computes, too."""

    __slots__ = ()

    def __call__(
        self, x_TC: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, layer: int
    ) -> Tensor:
        num_queries, num_keys, size = self.num_heads, self.num_kv_heads, self.head_dim
        q_TX, kv_TX = self.qkv(x_TC).split((2 * num_queries * size, 2 * num_keys * size), dim=-1)
        q_THD, gate_THD = q_TX.unflatten(-1, (num_queries, 2 * size)).split(size, dim=-1)
        heads_TXD = torch.cat((q_THD, kv_TX.unflatten(-1, (2 * num_keys, size))), dim=1)
        qk_TXD = heads_TXD[:, : num_queries + num_keys]
        self.norm_qk(qk_TXD)
        self.rotate(qk_TXD, *rotation)
        kv_T2KD = heads_TXD[:, num_queries:].view(-1, 2, num_keys, size)
        o_THD = attend(heads_TXD[:, :num_queries], kv_T2KD, layer)
        return self.o((o_THD * torch.sigmoid(gate_THD)).flatten(1))


@dataclass(frozen=True)
class DeltaWeights:
    """Weights of a delta net that are not linears, in float32.

    `conv_WT` is the convolution of each channel; the decay of a head is
    -exp(a_log) · softplus(a + dt_bias); `gain_V` belongs to the norm of the outputs.
    """

    conv_WT: Tensor
    a_log_H: Tensor
    dt_bias_H: Tensor
    gain_V: Tensor

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.conv_WT, self.a_log_H, self.dt_bias_H, self.gain_V))


class GatedDeltaNet:
    """Projections, a short convolution, the delta rule over the sequence's state, a gated norm.

    `inputs` computes q, k, v and z in one product, `gates` b and a.
    """

    __slots__ = ("delta", "eps", "gates", "inputs", "o", "weights")

    def __init__(
        self,
        spec: AttentionSpec,
        inputs: Linear,
        gates: Linear,
        o: Linear,
        weights: DeltaWeights,
        eps: float,
    ) -> None:
        assert spec.delta is not None
        self.delta: DeltaSpec = spec.delta
        self.inputs, self.gates, self.o, self.weights, self.eps = inputs, gates, o, weights, eps

    def __call__(
        self, x_TC: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, layer: int
    ) -> Tensor:
        delta, weights = self.delta, self.weights
        states = cast(StateAttend, attend).states
        mixed_TW, z_TX = (
            self.inputs(x_TC)
            .float()
            .split((delta.conv_width, delta.num_value_heads * delta.value_dim), dim=-1)
        )
        b_TH, a_TH = self.gates(x_TC).float().chunk(2, dim=-1)
        beta_TH = torch.sigmoid(b_TH)
        g_TH = -weights.a_log_H.exp() * F.softplus(a_TH + weights.dt_bias_H)
        out_THV = torch.empty_like(z_TX).unflatten(-1, (-1, delta.value_dim))
        of_layer = states.of(layer)
        if (runs := states.decodes) is not None:
            rows, conv = runs.rows, of_layer.read_conv(runs)
            window_SWT = torch.cat((conv, mixed_TW[rows].unsqueeze(-1)), dim=-1)
            of_layer.write_conv(runs, window_SWT[..., 1:])
            heads = self._heads(F.silu((window_SWT * weights.conv_WT).sum(dim=-1)))
            out_THV[rows] = _step(of_layer, runs, heads, g_TH[rows], beta_TH[rows])
        for runs in states.prompts:
            state = of_layer.read_conv(runs)[0], of_layer.read_memory(runs)[0]
            out, conv, memory = self._prompt(mixed_TW, g_TH, beta_TH, runs, state)
            out_THV[runs.rows] = out
            of_layer.write_conv(runs, conv.unsqueeze(0))
            of_layer.write_memory(runs, memory.unsqueeze(0))
        normed_THV = F.rms_norm(out_THV, (delta.value_dim,), weights.gain_V, self.eps)
        gated_TX = normed_THV.flatten(1) * F.silu(z_TX)
        return self.o(gated_TX.to(x_TC.dtype))

    def _prompt(
        self,
        mixed_TW: Tensor,
        g_TH: Tensor,
        beta_TH: Tensor,
        runs: RunStates,
        state: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(outputs, conv, memory) of one run of several tokens."""
        conv_WT, memory = state
        rows = runs.rows
        padded_WL = torch.cat((conv_WT, mixed_TW[rows].T), dim=-1)
        kernel = self.weights.conv_WT.unsqueeze(1)
        convolved = F.conv1d(padded_WL.unsqueeze(0), kernel, groups=len(kernel))[0]
        heads = self._heads(F.silu(convolved).T)
        q, k, v = (x_LHD.transpose(0, 1) for x_LHD in heads)
        out_HLV, memory = chunked(q, k, v, g_TH[rows].T, beta_TH[rows].T, memory)
        return out_HLV.transpose(0, 1), padded_WL[:, -conv_WT.shape[1] :], memory

    def _heads(self, convolved_TW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of each value head; q and k have length 1, and q the scale of its size."""
        delta = self.delta
        keys = delta.num_key_heads * delta.key_dim
        q, k, v = convolved_TW.split((keys, keys, delta.num_value_heads * delta.value_dim), dim=-1)
        q, k = (x.unflatten(-1, (delta.num_key_heads, delta.key_dim)) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        times = delta.num_value_heads // delta.num_key_heads
        if delta.tiled:
            q, k = q.repeat(1, times, 1), k.repeat(1, times, 1)
        else:
            q, k = q.repeat_interleave(times, dim=-2), k.repeat_interleave(times, dim=-2)
        return q * delta.key_dim**-0.5, k, v.unflatten(-1, (-1, delta.value_dim))


def _step(
    states: LayerStates,
    runs: RunStates,
    heads: tuple[Tensor, Tensor, Tensor],
    g_SH: Tensor,
    beta_SH: Tensor,
) -> Tensor:
    """One token of each run: its output; the states after it are stored.

    On a CPU one run at a time, so that a run's numbers do not depend on the others and no state is
    copied.
    """
    q_SHK, k_SHK, v_SHV = heads
    if states.memory.device.type != "cpu" or runs.places is None:
        memory_SHKV = states.read_memory(runs)
        out_SHV, memory_SHKV = recurrent(q_SHK, k_SHK, v_SHV, g_SH, beta_SH, memory_SHKV)
        states.write_memory(runs, memory_SHKV)
        return out_SHV
    decay_SH, out_SHV = g_SH.exp(), torch.empty_like(v_SHV)
    for i, (before, after) in enumerate(states.memories(runs)):
        out_SHV[i] = recurrent_into(
            before, after, q_SHK[i], k_SHK[i], v_SHV[i], decay_SH[i], beta_SH[i]
        )
    return out_SHV
