"""Weights in layouts other than integers with zero-points: K-quants, NF4, FP8.

A `CodedWeight` holds the tensors of the file. Their meaning is what the layout's reader
(`ridgeline.engine.checkpoints`) decodes, so calibration continues with the values that will be
loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.engine.checkpoints.codecs.base import codec_for
from ridgeline.engine.checkpoints.gguf.decode_blocks import decode_blocks
from ridgeline.modelspec.checkpoints.quantised import QuantisedCheckpoint

BLOCKS = ".blocks"
"""Suffix of a GGUF tensor's blocks, uint8 [O, bytes of a row]."""


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """`kind` is that of `QuantizeRecipe.numbers`; `tensors` by suffix, as in the format's file."""

    kind: str
    shape: tuple[int, int]
    tensors: Mapping[str, Tensor]

    def dense(self) -> Tensor:
        """The decoded weights, float32 [O, I]."""
        return _DECODERS[self.kind](self)


def _blocks(coded: CodedWeight) -> Tensor:
    kind, blocks = coded.kind.upper(), coded.tensors[BLOCKS]
    per_row = {"Q4_K": 144, "Q6_K": 210}[kind]
    numbers = decode_blocks(kind, blocks.reshape(-1, per_row).numpy())
    return torch.from_numpy(numbers).view(coded.shape)


def _by_codec(codec: str) -> Callable[[CodedWeight], Tensor]:
    foreign = QuantisedCheckpoint(codec=codec, name=codec, bits=8, integers=False)

    def decode(coded: CodedWeight) -> Tensor:
        found = codec_for(foreign).decode(
            coded.shape, lambda suffix: suffix in coded.tensors, lambda name: coded.tensors[name]
        )
        assert isinstance(found, Tensor)
        return found

    return decode


_DECODERS: Mapping[str, Callable[[CodedWeight], Tensor]] = {
    "q4_k": _blocks,
    "q6_k": _blocks,
    "nf4": _by_codec("bnb4"),
    "fp8-tensor": _by_codec("scaled"),
    "fp8-channel": _by_codec("scaled"),
    "fp8-block": _by_codec("scaled"),
}
