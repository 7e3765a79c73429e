"""INT4 weights on a GPU, with activations in the compute dtype (W4A16).

What. Two weights a byte, in groups of inputs with a scale, and optionally a zero-point, each. Few
rows go through Ridgeline's Triton kernel, which widens the weights in registers: a step reads a
quarter of BF16's bytes. Many rows are bound by arithmetic: the weight is widened to the compute
dtype once, then multiplied by the device's own product.

torch's `_weight_int4pack_mm` (tinygemm) was not chosen: its scales and zero-points are BF16 alone,
and it cannot represent the scales that our checkpoints have exactly.

Invariant. Weights are those of the CPU's INT4 bit for bit. Activations are not rounded, so results
are closer to the dequantised reference than the CPU's, whose activations have 8 bits.

When it loses. Widening costs a pass over the weight for every step of many rows.

Shape legend: T rows, I inputs, O outputs, G groups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.quant.int4.quantise import Int4Weights


class UnpackedInt4:
    """y_TO = W x_TI (+ bias_O) of 4-bit weights on any device."""

    __slots__ = ("bias_O", "dtype", "group_size", "num_in", "packed_OJ", "scale_OG", "zero_OG")

    def __init__(
        self, weights: Int4Weights, group_size: int, bias_O: Tensor | None, dtype: torch.dtype
    ) -> None:
        self.num_in, self.group_size = weights.q_OI.shape[1], group_size
        q_OI = F.pad(weights.q_OI, (0, -self.num_in % group_size))
        self.packed_OJ = (q_OI[:, ::2] | q_OI[:, 1::2] << 4).contiguous()
        self.scale_OG = weights.scale_OG.float() * weights.factor_O.float().unsqueeze(1)
        self.zero_OG, self.bias_O, self.dtype = weights.zero_OG, bias_O, dtype

    def widen(self) -> Tensor:
        """The weights in the compute dtype, [O, I]."""
        packed_OJ = self.packed_OJ
        q_OI = torch.stack((packed_OJ & 15, packed_OJ >> 4), -1).flatten(1)
        q_OGJ = q_OI.view(len(q_OI), -1, self.group_size).to(torch.int8)
        zero = 8 if self.zero_OG is None else self.zero_OG.to(torch.int8).unsqueeze(2)
        dense_OGJ = (q_OGJ - zero) * self.scale_OG.unsqueeze(2)
        return dense_OGJ.flatten(1)[:, : self.num_in].to(self.dtype)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return F.linear(x_TI, self.widen(), self.bias_O)

    @property
    def nbytes(self) -> int:
        kept = (self.packed_OJ, self.scale_OG, self.zero_OG, self.bias_O)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)
