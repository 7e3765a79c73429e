"""GPTQ's layout, v1 and v2 (AutoGPTQ, GPTQModel).

  qweight int32 [K·b/32, N]   packed along the inputs      scales fp16 [G, N]
  qzeros  int32 [G, N·b/32]   packed along the outputs     g_idx  int32 [K]: each input's group

w = scale · (q - z), where v1 stores z - 1 and v2 stores z. Which one a symmetric checkpoint uses is
read from the zeros themselves (all 2^(b-1) - 1, or all 2^(b-1)), since files with wrong metadata
exist. With zero-points nothing else can tell, so the metadata is trusted; z - 1 of z = 0 wraps
around.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ridgeline.engine.checkpoints.codecs.base import Read, contradiction
from ridgeline.engine.checkpoints.codecs.bit_packing import num_words, unpack
from ridgeline.engine.checkpoints.safetensors import TensorEntry
from ridgeline.engine.quant.grid import Grid
from ridgeline.modelspec.checkpoints.quantised import QuantisedCheckpoint

_SUFFIXES = (".qweight", ".qzeros", ".scales", ".g_idx")


class GptqCodec:
    """Decodes GPTQ v1 and v2."""

    def __init__(self, foreign: QuantisedCheckpoint) -> None:
        self._foreign = foreign

    def belongs(self, suffix: str) -> bool:
        return suffix in _SUFFIXES

    def shape(self, entries: Mapping[str, TensorEntry], read: Read) -> tuple[int, int]:
        num_words_in, num_out = entries[".qweight"].shape
        return num_out, num_words_in * 32 // self._foreign.bits

    def decode(
        self, shape: tuple[int, int], has: Callable[[str], bool], read: Read
    ) -> Grid | Tensor:
        num_out, num_in = shape
        bits, group = self._foreign.bits, self._foreign.group_size or num_in
        scale_GN = read(".scales").float()
        if tuple(scale_GN.shape) != (-(-num_in // group), num_out):
            raise contradiction("GPTQ scales", list(scale_GN.shape), [-(-num_in // group), num_out])
        q_OI = unpack(read(".qweight").T.contiguous(), bits, num_in)
        group_I = read(".g_idx") if has(".g_idx") else None
        if group_I is not None and int(group_I.max()) >= len(scale_GN):
            raise contradiction("g_idx names a group", int(group_I.max()), len(scale_GN) - 1)
        return Grid(
            q_OI,
            scale_GN.T.contiguous(),
            self._zeros(read(".qzeros"), num_out),
            bits,
            group,
            group_I,
        )

    def _zeros(self, words_GW: Tensor, num_out: int) -> Tensor | None:
        bits, middle = self._foreign.bits, 2 ** (self._foreign.bits - 1)
        if words_GW.shape[1] < num_words(bits, num_out):
            raise contradiction("GPTQ zeros", words_GW.shape[1], num_words(bits, num_out))
        stored_GN = unpack(words_GW, bits, num_out)
        if not self._foreign.zeros:
            low, high = int(stored_GN.min()), int(stored_GN.max())
            if (low, high) in ((middle - 1, middle - 1), (middle, middle)):
                return None
            raise contradiction(
                "sym with zero-points", f"{low}..{high}", f"{middle - 1} or {middle}"
            )
        offset = 1 if self._foreign.version == 1 else 0
        zero_GN: Tensor = (stored_GN + offset) & (2**bits - 1)
        return zero_GN.T.to(torch.uint8).contiguous()
