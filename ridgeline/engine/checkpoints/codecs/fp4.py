"""4-bit floats (e2m1) with a scale per group of inputs: NVFP4 and MXFP4.

  weight_packed uint8 [N, K/2]    two values a byte, the lower half first (modelopt: weight)
  weight_scale  float8_e4m3 [N, K/16], or uint8 [N, K/32]: an exponent, 2^(e - 127)
  weight_global_scale             one float32 that divides the scales (compressed-tensors)
  weight_scale_2                  one float32 that multiplies them (modelopt)

Layouts: OCP Microscaling Formats 1.0; compressed-tensors; NVIDIA Model Optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ridgeline.engine.checkpoints.codecs.base import Read, contradiction
from ridgeline.engine.checkpoints.safetensors import TensorEntry
from ridgeline.modelspec.checkpoints.quantised import QuantisedCheckpoint

_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_TABLE = torch.cat([_VALUES, -_VALUES])
_SCALES = (".weight_scale", ".weight_global_scale", ".weight_scale_2")
_IGNORED = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")
"""Static scales of activations and of the KV cache: each row gets its own scale, which is never coarser."""


class Fp4Codec:
    """Decodes modules of 4-bit floats to float32."""

    def __init__(self, foreign: QuantisedCheckpoint) -> None:
        assert foreign.group_size is not None
        self._group = foreign.group_size

    def belongs(self, suffix: str) -> bool:
        return suffix in (".weight", ".weight_packed", *_SCALES, *_IGNORED)

    def shape(self, entries: Mapping[str, TensorEntry], read: Read) -> tuple[int, int]:
        packed = entries.get(".weight_packed") or entries[".weight"]
        if packed.dtype != "U8" or len(packed.shape) != 2:
            raise contradiction(
                "4-bit floats", f"{packed.dtype} {list(packed.shape)}", "U8 [N, K/2]"
            )
        return packed.shape[0], packed.shape[1] * 2

    def decode(self, shape: tuple[int, int], has: Callable[[str], bool], read: Read) -> Tensor:
        num_out, num_in = shape
        packed = read(".weight_packed" if has(".weight_packed") else ".weight")
        halves = torch.stack([packed & 15, packed >> 4], dim=-1)
        value_OI = _TABLE[halves.long()].reshape(num_out, num_in)
        scale = read(".weight_scale")
        if tuple(scale.shape) != (num_out, num_in // self._group):
            raise contradiction("weight_scale", list(scale.shape), [num_out, num_in // self._group])
        scale_OG = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
        if has(".weight_global_scale"):
            scale_OG = scale_OG / read(".weight_global_scale").float()
        if has(".weight_scale_2"):
            scale_OG = scale_OG * read(".weight_scale_2").float()
        return value_OI * scale_OG.repeat_interleave(self._group, 1)
