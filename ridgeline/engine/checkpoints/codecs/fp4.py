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
from ridgeline.engine.quant.grid import Grid
from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.quantised import QuantisedCheckpoint

_BITS = 5
_TWICE = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.uint8)
_SCALES = (".weight_scale", ".weight_global_scale", ".weight_scale_2")
_IGNORED = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")
"""Static scales of activations and of the KV cache: each row gets its own scale, never coarser."""


def fp4_grid(packed_OH: Tensor, scale_OG: Tensor, group_size: int) -> Grid:
    """The grid of packed e2m1 numbers, [outputs, inputs / 2]: twice a number is an integer of at
    most 12, so that they are whole numbers of 5 bits times half their scale, exactly."""
    codes_OI = torch.stack((packed_OH & 15, packed_OH >> 4), -1).flatten(1)
    twice, middle = _TWICE[(codes_OI & 7).long()], 2 ** (_BITS - 1)
    q_OI = torch.where(codes_OI >= 8, middle - twice, middle + twice)
    return Grid(q_OI.contiguous(), scale_OG * 0.5, None, _BITS, group_size)


def shared_exponents(stored: Tensor, name: str) -> Tensor:
    """Scales of MXFP4, 2^(e - 127), exactly. Raises BadModel where one stands for NaN."""
    if bool((stored == 255).any()):
        raise BadModel(f"{name} holds NaN", value=255, limit="exponents below 255")
    return torch.exp2((stored.to(torch.int32) - 127).double()).float()


class Fp4Codec:
    """Decodes modules of 4-bit floats."""

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

    def decode(self, shape: tuple[int, int], has: Callable[[str], bool], read: Read) -> Grid:
        num_out, num_in = shape
        scale = read(".weight_scale")
        if tuple(scale.shape) != (num_out, num_in // self._group):
            raise contradiction("weight_scale", list(scale.shape), [num_out, num_in // self._group])
        exponents = scale.dtype == torch.uint8
        scale_OG = shared_exponents(scale, "weight_scale") if exponents else scale.float()
        if has(".weight_global_scale"):
            scale_OG = scale_OG / read(".weight_global_scale").float()
        if has(".weight_scale_2"):
            scale_OG = scale_OG * read(".weight_scale_2").float()
        packed = read(".weight_packed" if has(".weight_packed") else ".weight")
        return fp4_grid(packed, scale_OG, self._group)
