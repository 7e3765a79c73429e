"""bitsandbytes: NF4 and FP4 in blocks, and LLM.int8.

4 bits: `weight` uint8 [N·K/2, 1], the first of two in the high nibble; `weight.quant_map` holds the
16 values, `weight.absmax` the scale of every 64. Double quantisation: absmax are bytes indexing
`weight.nested_quant_map`, scaled by `weight.nested_absmax` per 256, plus an offset stored with the
shape as JSON in `weight.quant_state.bitsandbytes__nf4`.

8 bits: `weight` int8 [N, K], `SCB` float32 [N]: w = q · SCB / 127. Outlier activations are detected
at run time (`ridgeline.engine.quant.outlier_rows`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ridgeline.engine.checkpoints.codecs.base import Read, contradiction
from ridgeline.engine.checkpoints.safetensors import TensorEntry
from ridgeline.engine.quant.grid import Grid
from ridgeline.errors import DECODE_ERRORS
from ridgeline.modelspec.checkpoints.quantised import QuantisedCheckpoint

_STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")


class FourBitCodec:
    """Decodes NF4 and FP4."""

    def __init__(self, foreign: QuantisedCheckpoint) -> None:
        self._foreign = foreign

    def belongs(self, suffix: str) -> bool:
        return suffix == ".weight" or suffix.startswith(
            (".weight.absmax", ".weight.quant", ".weight.nested_")
        )

    def shape(self, entries: Mapping[str, TensorEntry], read: Read) -> tuple[int, int]:
        shape = _state(lambda name: name in entries, read).get("shape")
        if not isinstance(shape, list) or len(shape) != 2:
            raise contradiction("bitsandbytes quant_state", shape, "[outputs, inputs]")
        return shape[0], shape[1]

    def decode(
        self, shape: tuple[int, int], has: Callable[[str], bool], read: Read
    ) -> Grid | Tensor:
        state, packed = _state(has, read), read(".weight").reshape(-1)
        if len(packed) * 2 != shape[0] * shape[1]:
            raise contradiction("bitsandbytes weight", len(packed), shape[0] * shape[1] // 2)
        table = read(".weight.quant_map").float()
        absmax = read(".weight.absmax")
        if has(".weight.nested_absmax"):
            inner = read(".weight.nested_quant_map").float()[absmax.long()]
            outer = read(".weight.nested_absmax").float()
            outer = _spread(outer, state, "nested_blocksize", len(inner))
            absmax = inner * outer + float(state.get("nested_offset", 0.0))
        index = torch.stack([packed >> 4, packed & 15], 1).reshape(-1)
        scale = _spread(absmax.float(), state, "blocksize", len(index))
        return (table[index.long()] * scale).view(shape)


def _spread(blocks: Tensor, state: Mapping[str, Any], name: str, count: int) -> Tensor:
    """The number of each block for each of `count` values; blocks have the size `state[name]`."""
    size = state.get(name)
    needed = -(-count // size) if isinstance(size, int) and size >= 1 else 0
    if len(blocks) != needed:
        what = f"{size!r} for {len(blocks)} blocks of {count} values"
        raise contradiction(f"bitsandbytes {name}", what, "blocks that cover the values once")
    assert isinstance(size, int)
    return blocks.repeat_interleave(min(size, count))[:count]


def _state(has: Callable[[str], bool], read: Read) -> dict[str, Any]:
    name = next((name for name in _STATES if has(name)), None)
    if name is None:
        raise contradiction("bitsandbytes without a quant_state", None, _STATES[0])
    try:
        state: dict[str, Any] = json.loads(bytes(read(name).tolist()))
    except DECODE_ERRORS:
        raise contradiction("bitsandbytes quant_state", "no JSON", "JSON") from None
    return state


class EightBitCodec:
    """Decodes LLM.int8."""

    def __init__(self, foreign: QuantisedCheckpoint) -> None:
        self._foreign = foreign

    def belongs(self, suffix: str) -> bool:
        return suffix in (".weight", ".SCB", ".weight_format")

    def shape(self, entries: Mapping[str, TensorEntry], read: Read) -> tuple[int, int]:
        num_out, num_in = entries[".weight"].shape
        return num_out, num_in

    def decode(
        self, shape: tuple[int, int], has: Callable[[str], bool], read: Read
    ) -> Grid | Tensor:
        if has(".weight_format") and int(read(".weight_format").reshape(-1)[0]) != 0:
            raise contradiction("bitsandbytes weight_format", "not row-major", "0")
        q_OI = (read(".weight").to(torch.int16) + 128).to(torch.uint8)
        scale_O1 = (read(".SCB").float() / 127).reshape(-1, 1)
        return Grid(q_OI, scale_O1, None, 8, shape[1])
