"""A codec reads the quantised modules of one layout. The family's contract.

Invariants: what `decode` gives means exactly the numbers that the layout's own library computes in
float32 (tests compare with vectors made by those libraries); `shape` is that of the dense weight,
[outputs, inputs]; a contradiction between tensors and config raises BadModel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from ridgeline.engine.checkpoints.safetensors import Entry
from ridgeline.engine.quant.grid import Grid
from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.quantised import QuantisedCheckpoint

Read = Callable[[str], Tensor]
"""A tensor of the module by its suffix, ".qweight"."""

CODECS = MappingProxyType(
    {
        "gptq": "ridgeline.engine.checkpoints.gptq:GptqCodec",
        "awq": "ridgeline.engine.checkpoints.awq:AwqCodec",
        "compressed_packed": "ridgeline.engine.checkpoints.compressed:PackedCodec",
        "scaled": "ridgeline.engine.checkpoints.scaled:ScaledCodec",
        "bnb4": "ridgeline.engine.checkpoints.bnb:FourBitCodec",
        "bnb8": "ridgeline.engine.checkpoints.bnb:EightBitCodec",
    }
)


class Codec(Protocol):
    """Made from what the config says; see the module's head."""

    def __init__(self, foreign: QuantisedCheckpoint) -> None: ...

    def belongs(self, suffix: str) -> bool:
        """Is a tensor whose name ends so, after the module's name, part of the weight?"""
        ...

    def shape(self, entries: Mapping[str, Entry], read: Read) -> tuple[int, int]:
        """[outputs, inputs] of a module; `entries` by suffix."""
        ...

    def decode(
        self, shape: tuple[int, int], has: Callable[[str], bool], read: Read
    ) -> Grid | Tensor:
        """The weight, as a grid where it is one, else dense in float32."""
        ...


def codec_for(foreign: QuantisedCheckpoint) -> Codec:
    """The codec that `foreign` names."""
    module, _, cls = CODECS[foreign.codec].partition(":")
    kind: type[Codec] = getattr(import_module(module), cls)
    return kind(foreign)


def contradiction(what: str, value: object, limit: object) -> BadModel:
    """Tensors that are not what the config says."""
    return BadModel(
        f"the quantised tensors contradict their config: {what}",
        value=value,
        limit=limit,
        fix="check that config.json belongs to these weights",
    )
