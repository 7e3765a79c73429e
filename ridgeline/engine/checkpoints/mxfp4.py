"""Experts in MXFP4 as gpt-oss publishes them: two tensors per projection, all experts stacked.

  X_blocks  uint8 [experts, outputs, inputs / 32, 16]: two e2m1 numbers per byte, the low half first
  X_scales  uint8 [experts, outputs, inputs / 32]: the exponent that 32 numbers share, plus 127

Source. OCP Microscaling Formats (MX) v1.0. Experts run as weights of 8 bits in groups of 32,
exactly. Other tensors are plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from ridgeline.engine.checkpoints.codecs.fp4 import fp4_grid, shared_exponents
from ridgeline.engine.checkpoints.safetensors import FLOATS, TensorEntry, entries_of
from ridgeline.engine.checkpoints.sources import CheckpointWeights, match
from ridgeline.engine.checkpoints.tensor_names import LocatedTensor, Part
from ridgeline.engine.kernels.native_linear import Packed
from ridgeline.engine.quant.grid import Grid, pack, refusal, stack_grids
from ridgeline.errors import BadModel, CannotRun
from ridgeline.modelspec.model import LinearSpec, ModelSpec

GROUP = 32


class Mxfp4Weights(CheckpointWeights):
    """The tensors of a checkpoint whose experts are in MXFP4. Raises BadModel like its base."""

    def __init__(self, directory: Path, spec: ModelSpec) -> None:
        super().__init__(directory, spec)
        self._parts = {(part.key, part.layer, part.expert): part for part in self.located}

    def _located(self, directory: Path, spec: ModelSpec) -> dict[Part, LocatedTensor]:
        self.entries = entries_of(directory, FLOATS | {"U8": 1})
        return match(spec, _as_if_dense(self.entries), self._is_zero)

    def get(self, part: Part) -> Tensor:
        at = self.located[part]
        return super().get(part) if at.name in self.entries else self._grid(at).dense()

    def packed(
        self, spec: LinearSpec, keys: Sequence[str], layer: int | None, expert: int | None
    ) -> Packed | None:
        """The experts' product of `keys` in 8 bits; None if it is plain or computed dense."""
        places = [self.located[self._parts[key, layer, expert]] for key in keys]
        if spec.format.kind == "dense" or any(at.name in self.entries for at in places):
            return None
        grid = stack_grids([self._grid(at) for at in places])
        why = refusal(grid)
        if why is not None:
            raise CannotRun(f"{places[0].name} cannot be computed packed: {why}")
        return pack(grid)

    def _grid(self, at: LocatedTensor) -> Grid:
        rows = slice(None) if at.rows is None else at.rows
        scales = f"{at.name}_scales"
        blocks_OGB, scales_OG = (
            self.files[self.entries[name].file].get_slice(name)[at.expert][rows]
            for name in (f"{at.name}_blocks", scales)
        )
        return fp4_grid(blocks_OGB.flatten(1), shared_exponents(scales_OG, scales), GROUP)


def _as_if_dense(entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The entries with [experts, inputs, outputs] in place of each pair of blocks and scales."""
    dense = {name: entry for name, entry in entries.items() if entry.dtype != "U8"}
    for name, entry in entries.items():
        if not name.endswith("_blocks") or entry.dtype != "U8":
            continue
        stem = name.removesuffix("_blocks")
        scales = entries.get(f"{stem}_scales")
        if scales is None or len(entry.shape) != 4 or entry.shape[:3] != scales.shape:
            raise BadModel(
                f"the MXFP4 weight {stem} lacks scales of the shape of its blocks",
                value=None if scales is None else list(scales.shape),
                limit=list(entry.shape[:3]),
            )
        experts, num_out, groups, _ = entry.shape
        dense[stem] = entry._replace(shape=(experts, groups * GROUP, num_out))
    return dense
