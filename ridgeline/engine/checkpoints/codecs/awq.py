"""AWQ's GEMM layout (AutoAWQ): 4 bits, packed along the outputs in the order of its kernel.

  qweight int32 [K, N/8] · qzeros int32 [G, N/8] · scales fp16 [G, N]

Nibble i of a word holds column (0, 2, 4, 6, 1, 3, 5, 7)[i] of its eight. w = scale · (q - z),
without an offset of one and without act-order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ridgeline.engine.checkpoints.codecs.base import Read, contradiction
from ridgeline.engine.checkpoints.codecs.bit_packing import unpack
from ridgeline.engine.checkpoints.safetensors import TensorEntry
from ridgeline.engine.quant.grid import Grid
from ridgeline.modelspec.checkpoints.quantised import QuantisedCheckpoint

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of each nibble."""
PLACE = tuple(ORDER.index(column) for column in range(8))
_SUFFIXES = (".qweight", ".qzeros", ".scales")


class AwqCodec:
    """Decodes AWQ's GEMM layout."""

    def __init__(self, foreign: QuantisedCheckpoint) -> None:
        self._foreign = foreign

    def belongs(self, suffix: str) -> bool:
        return suffix in _SUFFIXES

    def shape(self, entries: Mapping[str, TensorEntry], read: Read) -> tuple[int, int]:
        num_in, words = entries[".qweight"].shape
        return words * 8, num_in

    def decode(
        self, shape: tuple[int, int], has: Callable[[str], bool], read: Read
    ) -> Grid | Tensor:
        num_out, num_in = shape
        group = self._foreign.group_size or num_in
        scale_GN = read(".scales").float()
        if tuple(scale_GN.shape) != (-(-num_in // group), num_out):
            raise contradiction("AWQ scales", list(scale_GN.shape), [-(-num_in // group), num_out])
        q_OI = _columns(read(".qweight"), num_out)
        zero_OG = _columns(read(".qzeros"), num_out) if self._foreign.zeros else None
        return Grid(q_OI, scale_GN.T.contiguous(), zero_OG, 4, group)


def _columns(words_RW: Tensor, num_out: int) -> Tensor:
    """[N, R]."""
    nibbles_RW8 = unpack(words_RW, 4, num_out).view(len(words_RW), -1, 8)
    return nibbles_RW8[:, :, list(PLACE)].flatten(1).T.contiguous()
