"""Weights in a small dtype with separate scales: compressed-tensors int- and float-quantized, FP8.

  weight int8 or float8_e4m3 [N, K]
  weight_scale        one, [N] or [N, 1], [N, G], or blocks [N / block, K / block]
  weight_scale_inv    the same under DeepSeek's name; also a multiplier
  weight_zero_point   int8 like the scales, if integers are asymmetric

Static activation scales of a checkpoint (input_scale) are not used: rows are rounded with scales of
their own, which is never coarser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ridgeline.engine.checkpoints.codecs.base import Read, contradiction
from ridgeline.engine.checkpoints.safetensors import TensorEntry
from ridgeline.engine.quant.grid import Grid
from ridgeline.modelspec.checkpoints.quantised import QuantisedCheckpoint

_SCALES = (".weight_scale", ".weight_scale_inv")
_OTHERS = (".weight_zero_point", ".weight_shape", ".weight_g_idx")
_IGNORED = (".input_scale", ".input_zero_point", ".activation_scale")


class ScaledCodec:
    """Decodes weights with separate scales."""

    def __init__(self, foreign: QuantisedCheckpoint) -> None:
        self._foreign = foreign

    def belongs(self, suffix: str) -> bool:
        return suffix in (".weight", *_SCALES, *_OTHERS, *_IGNORED)

    def shape(self, entries: Mapping[str, TensorEntry], read: Read) -> tuple[int, int]:
        wanted = ("I8",) if self._foreign.integers else ("F8_E4M3",)
        if entries[".weight"].dtype not in wanted:
            raise contradiction("weight", entries[".weight"].dtype, wanted[0])
        num_out, num_in = entries[".weight"].shape
        return num_out, num_in

    def decode(
        self, shape: tuple[int, int], has: Callable[[str], bool], read: Read
    ) -> Grid | Tensor:
        scale = read(next(name for name in _SCALES if has(name))).float()
        weight_OI = read(".weight")
        if not self._foreign.integers:
            return weight_OI.float() * self._spread(scale, shape)
        scale_OG = scale.reshape(1, 1) if scale.numel() == 1 else scale.reshape(shape[0], -1)
        scale_OG = scale_OG.expand(shape[0], -1).contiguous()
        if shape[1] % scale_OG.shape[1]:
            raise contradiction("weight_scale", list(scale.shape), list(shape))
        zero_OG = None
        if self._foreign.zeros:
            zero = read(".weight_zero_point").to(torch.int16).reshape(scale.shape)
            zero_OG = (zero + 128).to(torch.uint8).reshape(-1, scale_OG.shape[1])
            zero_OG = zero_OG.expand(shape[0], -1).contiguous()
        q_OI = (weight_OI.to(torch.int16) + 128).to(torch.uint8)
        return Grid(q_OI, scale_OG, zero_OG, 8, shape[1] // scale_OG.shape[1])

    def _spread(self, scale: Tensor, shape: tuple[int, int]) -> Tensor:
        """Scales that broadcast over [N, K]."""
        num_out, num_in = shape
        if scale.numel() in (1, num_out) and scale.dim() < 3:
            return scale.reshape(-1, 1)
        rows, columns = self._foreign.block
        if scale.shape[0] == num_out and num_in % scale.shape[1] == 0:
            return scale.repeat_interleave(num_in // scale.shape[1], 1)
        if tuple(scale.shape) != (-(-num_out // rows), -(-num_in // columns)):
            raise contradiction("weight_scale", list(scale.shape), f"blocks of {rows} x {columns}")
        wide = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return wide[:num_out, :num_in]
