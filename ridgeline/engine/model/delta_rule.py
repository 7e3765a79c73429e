"""The gated delta rule, token by token and in chunks.

What. A linear attention with one matrix per head as its memory: S decays by exp(g), then the value
that it predicts for the key is corrected towards the new value by the share beta, and the query
reads it:

    S ← exp(g) S          S ← S + k (beta (v - kᵀ S))ᵀ          o = Sᵀ q

Paper. Gated Delta Networks (Yang et al. 2024, arXiv:2412.06464); the chunked form is that of the
DeltaNet paper (Yang et al. 2024, arXiv:2406.06484): within a chunk, the corrections form a
unitriangular system that is solved once, so that most of the work is matrix products.

On a CPU a step is limited by reading and writing the memory: `recurrent_into` reads it once and
writes it once, without temporaries of its size, one sequence at a time; its sums are rearranged:

    p = exp(g) [k; q] S     c = beta (v - p_k)     S ← exp(g) S + k cᵀ     o = p_q + (q·k) c

Invariant. All forms give the same numbers up to rounding, from any state.

When it loses. A chunk of one token costs more than a step of `recurrent`.

Shape legend: S sequences, H heads, L tokens, N chunks of B tokens, K key size, V value size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def recurrent(
    q_SHK: Tensor, k_SHK: Tensor, v_SHV: Tensor, g_SH: Tensor, beta_SH: Tensor, state_SHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each sequence: its output o_SHV, and the state after it."""
    state_SHKV = state_SHKV * g_SH.exp()[..., None, None]
    predicted_SHV = (state_SHKV * k_SHK.unsqueeze(-1)).sum(dim=-2)
    change_SHV = (v_SHV - predicted_SHV) * beta_SH.unsqueeze(-1)
    state_SHKV = state_SHKV + k_SHK.unsqueeze(-1) * change_SHV.unsqueeze(-2)
    return (state_SHKV * q_SHK.unsqueeze(-1)).sum(dim=-2), state_SHKV


def recurrent_into(
    from_HKV: Tensor,
    into_HKV: Tensor,
    q_HK: Tensor,
    k_HK: Tensor,
    v_HV: Tensor,
    decay_H: Tensor,
    beta_H: Tensor,
) -> Tensor:
    """One token of one sequence: its output o_HV; the state after it is written to `into_HKV`.

    `decay_H` is exp(g). The two states may be one.
    """
    decay_H11 = decay_H[:, None, None]
    read_H2V = torch.bmm(torch.stack((k_HK, q_HK), dim=1), from_HKV) * decay_H11
    change_HV = (v_HV - read_H2V[:, 0]) * beta_H.unsqueeze(-1)
    torch.mul(from_HKV, decay_H11, out=into_HKV)
    into_HKV.addcmul_(k_HK.unsqueeze(-1), change_HV.unsqueeze(1))
    return read_H2V[:, 1] + (q_HK * k_HK).sum(dim=-1, keepdim=True) * change_HV


def chunked(
    q_HLK: Tensor, k_HLK: Tensor, v_HLV: Tensor, g_HL: Tensor, beta_HL: Tensor, state_HKV: Tensor
) -> tuple[Tensor, Tensor]:
    """L tokens of one sequence: their outputs o_HLV, and the state after the last one."""
    length = q_HLK.shape[1]
    padding = -length % CHUNK
    # a padded token has beta 0 and g 0: it leaves the state as it is
    q, k, v = (_in_chunks(x, padding) for x in (q_HLK, k_HLK, v_HLV))
    beta_HNB1 = _in_chunks(beta_HL.unsqueeze(-1), padding)
    g_HNB = _in_chunks(g_HL.unsqueeze(-1), padding).squeeze(-1).cumsum(-1)
    decay = (g_HNB.unsqueeze(-1) - g_HNB.unsqueeze(-2)).tril().exp().tril()
    system = (k * beta_HNB1) @ k.transpose(-1, -2) * decay
    system = system.tril(-1)
    right = torch.cat((v * beta_HNB1, k * beta_HNB1 * g_HNB.exp().unsqueeze(-1)), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    within = q @ k.transpose(-1, -2) * decay
    q = q * g_HNB.exp().unsqueeze(-1)
    k = k * (g_HNB[..., -1:] - g_HNB).exp().unsqueeze(-1)
    last_HN11 = g_HNB[..., -1].exp()[..., None, None]
    outputs = torch.empty_like(values)
    for chunk in range(q.shape[1]):
        new_HBV = values[:, chunk] - keys[:, chunk] @ state_HKV
        outputs[:, chunk] = q[:, chunk] @ state_HKV + within[:, chunk] @ new_HBV
        state_HKV = state_HKV * last_HN11[:, chunk] + k[:, chunk].transpose(-1, -2) @ new_HBV
    return outputs.flatten(1, 2)[:, :length], state_HKV


def _in_chunks(x_HLD: Tensor, padding: int) -> Tensor:
    """[H, N, B, D], the last chunk padded with zeros."""
    padded = F.pad(x_HLD, (0, 0, 0, padding))
    return padded.view(len(padded), -1, CHUNK, padded.shape[-1])
