"""compressed-tensors, pack-quantized: integers of 2 to 8 bits in words, along the inputs.

  weight_packed int32 [N, W]   value + 2^(b-1)       weight_shape int64 [2]
  weight_scale  [N, G]         weight_zero_point     packed along the outputs, [N·b/32, G]
  weight_g_idx  int32 [K]: each input's group (act-order)

3, 5, 6 and 7 bits are packed in two ways, distinguished by the width: 32 // b values per word
(before May 2026), or one bit stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ridgeline.engine.checkpoints.codecs.base import Read, contradiction
from ridgeline.engine.checkpoints.codecs.bit_packing import num_words, unpack
from ridgeline.engine.checkpoints.safetensors import TensorEntry
from ridgeline.engine.quant.grid import Grid
from ridgeline.modelspec.checkpoints.quantised import QuantisedCheckpoint

_SUFFIXES = (
    ".weight_packed",
    ".weight_scale",
    ".weight_zero_point",
    ".weight_shape",
    ".weight_g_idx",
)


class PackedCodec:
    """Decodes pack-quantized modules."""

    def __init__(self, foreign: QuantisedCheckpoint) -> None:
        self._foreign = foreign

    def belongs(self, suffix: str) -> bool:
        return suffix in _SUFFIXES or suffix in (".input_scale", ".input_zero_point")

    def shape(self, entries: Mapping[str, TensorEntry], read: Read) -> tuple[int, int]:
        num_out, num_in = read(".weight_shape").tolist()
        return num_out, num_in

    def decode(
        self, shape: tuple[int, int], has: Callable[[str], bool], read: Read
    ) -> Grid | Tensor:
        num_out, num_in = shape
        bits, group = self._foreign.bits, self._foreign.group_size or num_in
        scale_OG = read(".weight_scale").float().reshape(-1, max(1, -(-num_in // group)))
        if len(scale_OG) == 1:
            scale_OG = scale_OG.expand(num_out, -1).contiguous()
        if len(scale_OG) != num_out:
            raise contradiction("weight_scale", list(scale_OG.shape), num_out)
        q_OI = self._numbers(read(".weight_packed"), num_in)
        zero_OG = None
        if self._foreign.zeros:
            if not has(".weight_zero_point"):
                raise contradiction("asymmetric without weight_zero_point", None, None)
            zero_OG = self._numbers(read(".weight_zero_point").T.contiguous(), num_out)
            zero_OG = zero_OG.T.contiguous()
        group_I = read(".weight_g_idx") if has(".weight_g_idx") else None
        if group_I is not None and int(group_I.min()) < 0:
            group_I = None  # -1 throughout: not in use
        return Grid(q_OI, scale_OG, zero_OG, bits, group, group_I)

    def _numbers(self, words_RW: Tensor, count: int) -> Tensor:
        bits, width = self._foreign.bits, words_RW.shape[1]
        if width == num_words(bits, count):
            return unpack(words_RW, bits, count)
        if width == num_words(bits, count, wasteful=True):
            return unpack(words_RW, bits, count, wasteful=True)
        raise contradiction(f"words of {count} numbers", width, num_words(bits, count))
