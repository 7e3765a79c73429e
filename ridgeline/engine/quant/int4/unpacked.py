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

from ridgeline.engine.kernels.triton import load, why_not
from ridgeline.engine.quant.int4.quantise import Int4Weights

STREAMED_ROWS = 160
"""Up to this many rows, the kernel that streams the weights is used, in tiles of 64 rows.

Derived, not measured: on an H200, llama-3.1-8b took 4.35 ms for a step of 32 rows through the
kernel and 24.6 ms for one of 128 rows that widened every weight (benchmarks/gpu/results). Even if
every 32 rows cost a whole step, five times 4.35 ms are less.
"""
HALF = 64


def pack_halves(q_OI: Tensor) -> Tensor:
    """Bytes [O, J] of nibbles (uint8, 0..15): 64 bytes for each 128 inputs.

    Byte j of such a block holds its input j in the low nibble and its input 64 + j in the high one,
    so that a kernel reads each half of the activations as it lies. Missing inputs are zeros.
    """
    halves_OB2J = F.pad(q_OI, (0, -q_OI.shape[1] % (2 * HALF))).unflatten(1, (-1, 2, HALF))
    low_OBJ, high_OBJ = halves_OB2J.unbind(2)
    return torch.flatten(low_OBJ | (high_OBJ << 4), 1)


def unpack_halves(packed_OJ: Tensor) -> Tensor:
    """The nibbles of `pack_halves`, padding included."""
    halves_OBJ = packed_OJ.unflatten(1, (-1, HALF))
    return torch.stack((halves_OBJ & 15, halves_OBJ >> 4), 2).flatten(1)


class UnpackedInt4:
    """y_TO = W x_TI (+ bias_O) of 4-bit weights on any device."""

    __slots__ = ("bias_O", "dtype", "group_size", "num_in", "packed_OJ", "scale_OG", "zero_OG")

    def __init__(
        self, weights: Int4Weights, group_size: int, bias_O: Tensor | None, dtype: torch.dtype
    ) -> None:
        self.num_in, self.group_size = weights.q_OI.shape[1], group_size
        self.packed_OJ = pack_halves(weights.q_OI)
        self.scale_OG = weights.scale_OG.float() * weights.factor_O.float().unsqueeze(1)
        self.zero_OG, self.bias_O, self.dtype = weights.zero_OG, bias_O, dtype

    def widen(self) -> Tensor:
        """The weights in the compute dtype, [O, I]."""
        if self.packed_OJ.is_cuda and not why_not(self.packed_OJ.device):
            weight_OI: Tensor = load("widen").widen_int4(
                self.packed_OJ,
                self.scale_OG,
                self.zero_OG,
                group_size=self.group_size,
                num_in=self.num_in,
                dtype=self.dtype,
            )
            return weight_OI
        q_OI = unpack_halves(self.packed_OJ)
        num_padded = self.scale_OG.shape[1] * self.group_size
        q_OGJ = q_OI[:, :num_padded].unflatten(1, (-1, self.group_size)).to(torch.int8)
        zero = 8 if self.zero_OG is None else self.zero_OG.to(torch.int8).unsqueeze(2)
        dense_OGJ = (q_OGJ - zero) * self.scale_OG.unsqueeze(2)
        return torch.flatten(dense_OGJ, 1)[:, : self.num_in].to(self.dtype)

    @staticmethod
    def streams(num_rows: int, device: torch.device) -> bool:
        """Whether a product of this many rows reads the packed weights, instead of widened ones."""
        return device.type == "cuda" and 0 < num_rows <= STREAMED_ROWS and not why_not(device)

    def __call__(self, x_TI: Tensor) -> Tensor:
        if self.streams(len(x_TI), x_TI.device):
            streamed_TO: Tensor = load("linear").w4a16(
                x_TI,
                self.packed_OJ,
                self.scale_OG,
                self.zero_OG,
                group_size=self.group_size,
                bias_O=self.bias_O,
            )
            return streamed_TO
        return F.linear(x_TI, self.widen(), self.bias_O)

    @property
    def nbytes(self) -> int:
        kept = (self.packed_OJ, self.scale_OG, self.zero_OG, self.bias_O)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)
