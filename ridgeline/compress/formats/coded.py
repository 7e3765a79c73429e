"""Weights in a layout that is no grid of whole numbers and zero-points: K-quants, NF4, FP8.

`Coded` holds the very tensors that a file will hold; what they mean is what the reader of that
layout (`ridgeline.engine.checkpoints`) decodes from them, so that calibration goes on with the numbers
that will be loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.engine.checkpoints.base import codec_for
from ridgeline.engine.checkpoints.gguf_blocks import decode_blocks
from ridgeline.modelspec.checkpoints.quantised import Foreign

BLOCKS = ".blocks"
"""Suffix of a GGUF tensor's blocks, uint8 [O, bytes of a row]."""


@dataclass(frozen=True, slots=True)
class Coded:
    """`kind` is that of `Recipe.numbers`; `tensors` by suffix, as the format's file has them."""

    kind: str
    shape: tuple[int, int]
    tensors: Mapping[str, Tensor]

    def dense(self) -> Tensor:
        """The weights that they mean, float32 [O, I]."""
        return _DECODERS[self.kind](self)


def _blocks(coded: Coded) -> Tensor:
    kind, blocks = coded.kind.upper(), coded.tensors[BLOCKS]
    per_row = {"Q4_K": 144, "Q6_K": 210}[kind]
    numbers = decode_blocks(kind, blocks.reshape(-1, per_row).numpy())
    return torch.from_numpy(numbers).view(coded.shape)


def _by_codec(codec: str) -> Callable[[Coded], Tensor]:
    foreign = Foreign(codec=codec, name=codec, bits=8, integers=False)

    def decode(coded: Coded) -> Tensor:
        found = codec_for(foreign).decode(
            coded.shape, lambda suffix: suffix in coded.tensors, lambda name: coded.tensors[name]
        )
        assert isinstance(found, Tensor)
        return found

    return decode


_DECODERS: Mapping[str, Callable[[Coded], Tensor]] = {
    "q4_k": _blocks,
    "q6_k": _blocks,
    "nf4": _by_codec("bnb4"),
    "fp8-tensor": _by_codec("scaled"),
    "fp8-channel": _by_codec("scaled"),
    "fp8-block": _by_codec("scaled"),
}
