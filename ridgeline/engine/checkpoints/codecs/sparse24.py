"""compressed-tensors, sparse-24-bitmask: weights of which two in four adjacent inputs are stored.

  compressed  [N, K / 2]  the stored values, in order     shape  int64 [2, 1]
  bitmask     uint8 [N, ⌈K / 8⌉]: bit i % 8 of byte i // 8 is set where input i is stored

A stored value may itself be zero. The file holds half of the values and one bit for each weight,
9/16 of the dense 16-bit size. In memory the weight is dense again, unless `--quantization
sparse-24` stores it so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.checkpoints.codecs.base import Read, contradiction
from ridgeline.engine.checkpoints.safetensors import TensorEntry
from ridgeline.engine.quant.sparse24 import stored_mask
from ridgeline.modelspec.checkpoints.quantised import QuantisedCheckpoint

_SUFFIXES = (".compressed", ".bitmask", ".shape")


def compress_24(weight_OI: Tensor) -> dict[str, Tensor]:
    """The tensors of a 2:4 sparse weight by suffix. Raises BadInput if it is not sparse so."""
    num_out, num_in = weight_OI.shape
    mask_OI = stored_mask(weight_OI)
    bits_OI = F.pad(mask_OI.to(torch.uint8), (0, -num_in % 8)).view(num_out, -1, 8)
    powers_8 = 2 ** torch.arange(8, dtype=torch.uint8)
    return {
        ".compressed": weight_OI[mask_OI].view(num_out, num_in // 2),
        ".bitmask": (bits_OI * powers_8).sum(-1, dtype=torch.uint8),
        ".shape": torch.tensor([[num_out], [num_in]]),
    }


class Sparse24Codec:
    """Decodes 2:4 sparse modules into dense weights."""

    def __init__(self, foreign: QuantisedCheckpoint) -> None:
        pass

    def belongs(self, suffix: str) -> bool:
        return suffix in _SUFFIXES

    def shape(self, entries: Mapping[str, TensorEntry], read: Read) -> tuple[int, int]:
        num_out, num_in = read(".shape").flatten().tolist()
        return num_out, num_in

    def decode(self, shape: tuple[int, int], has: Callable[[str], bool], read: Read) -> Tensor:
        values_OK, bytes_OB = read(".compressed"), read(".bitmask")
        if tuple(values_OK.shape) != (shape[0], shape[1] // 2):
            raise contradiction("compressed", list(values_OK.shape), [shape[0], shape[1] // 2])
        if tuple(bytes_OB.shape) != (shape[0], -(-shape[1] // 8)):
            raise contradiction("bitmask", list(bytes_OB.shape), [shape[0], -(-shape[1] // 8)])
        bits_OB8 = bytes_OB.unsqueeze(-1).bitwise_right_shift(torch.arange(8, dtype=torch.uint8))
        mask_OI = bits_OB8.bitwise_and(1).flatten(1)[:, : shape[1]].bool()
        if not bool((mask_OI.sum(1) == shape[1] // 2).all()):
            raise contradiction("bits of a row", "another number than values", shape[1] // 2)
        weight_OI = torch.zeros(shape)
        weight_OI[mask_OI] = values_OK.float().flatten()
        return weight_OI
