"""The interface of codecs: a codec reads the quantised modules of one layout.

Invariants: `decode` gives exactly the float32 values that the layout's own library computes (tests
compare with vectors made by those libraries); `shape` is that of the dense weight, [outputs,
inputs]; a contradiction between tensors and config raises BadModel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from ridgeline.engine.checkpoints.safetensors import TensorEntry
from ridgeline.engine.quant.grid import Grid
from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.quantised import QuantisedCheckpoint

Read = Callable[[str], Tensor]
"""A tensor of the module by its suffix, ".qweight"."""

CODECS = MappingProxyType(
    {
        "gptq": "ridgeline.engine.checkpoints.codecs.gptq:GptqCodec",
        "awq": "ridgeline.engine.checkpoints.codecs.awq:AwqCodec",
        "compressed_packed": "ridgeline.engine.checkpoints.codecs.compressed_tensors:PackedCodec",
        "sparse24": "ridgeline.engine.checkpoints.codecs.sparse24:Sparse24Codec",
        "scaled": "ridgeline.engine.checkpoints.codecs.scaled:ScaledCodec",
        "fp4": "ridgeline.engine.checkpoints.codecs.fp4:Fp4Codec",
        "bnb4": "ridgeline.engine.checkpoints.codecs.bitsandbytes:FourBitCodec",
        "bnb8": "ridgeline.engine.checkpoints.codecs.bitsandbytes:EightBitCodec",
    }
)


class Codec(Protocol):
    """Reads modules of one layout, constructed from what the config says."""

    def __init__(self, foreign: QuantisedCheckpoint) -> None: ...

    def belongs(self, suffix: str) -> bool:
        """Whether a tensor with this suffix after the module's name is part of the weight."""
        ...

    def shape(self, entries: Mapping[str, TensorEntry], read: Read) -> tuple[int, int]:
        """[outputs, inputs] of a module; `entries` by suffix."""
        ...

    def decode(
        self, shape: tuple[int, int], has: Callable[[str], bool], read: Read
    ) -> Grid | Tensor:
        """The weight as a grid if it is one, else dense in float32."""
        ...


def codec_for(foreign: QuantisedCheckpoint) -> Codec:
    """The codec named by `foreign`."""
    module, _, cls = CODECS[foreign.codec].partition(":")
    kind: type[Codec] = getattr(import_module(module), cls)
    return kind(foreign)


def contradiction(what: str, value: object, limit: object) -> BadModel:
    """An error for tensors that contradict the config."""
    return BadModel(
        f"the quantised tensors contradict their config: {what}",
        value=value,
        limit=limit,
        fix="check that config.json belongs to these weights",
    )
