"""Finished layers of a pruning on disk: an interruption loses one layer's work.

  OUT.partial/run.json                  the recipe and source; remains of another run are refused
  OUT.partial/kept_layers.json          the layers chosen to remain
  OUT.partial/layer-00003.safetensors   the changed tensors of the third layer of the result

A layer's file is written under another name and renamed, so a file that exists is complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
from safetensors.torch import save_file
from torch import Tensor

from ridgeline.compress.prune.report import PrunedLayerReport
from ridgeline.compress.unfinished import file_of_interrupted_run, open_tensors
from ridgeline.engine.checkpoints.sources import PlainWeights, WeightSource
from ridgeline.engine.checkpoints.tensor_names import Part


def _name(part: Part) -> str:
    return part.key if part.expert is None else f"{part.key}.{part.expert}"


class LayerView(PlainWeights):
    """A model with only some of its layers."""

    def __init__(self, source: WeightSource, layers: Sequence[int]) -> None:
        self._source, self._layers = source, layers

    def get(self, part: Part) -> Tensor:
        layer = None if part.layer is None else self._layers[part.layer]
        return self._source.get(part._replace(layer=layer))


class EditedLayer(PlainWeights):
    """A layer being pruned: its changed tensors by key and expert, and the rest unchanged."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.edits: dict[tuple[str, int | None], Tensor] = {}

    def get(self, part: Part) -> Tensor:
        edit = self.edits.get((part.key, part.expert))
        return self._source.get(part) if edit is None else edit


class PrunedLayers(PlainWeights):
    """The finished layers; layered over `source`, which has their originals."""

    def __init__(self, folder: Path, source: WeightSource) -> None:
        self._folder, self._source = folder, source

    def _file(self, layer: int) -> Path:
        return self._folder / f"layer-{layer:05}.safetensors"

    def has(self, layer: int) -> bool:
        return self._file(layer).is_file()

    def save(
        self,
        layer: int,
        edits: Mapping[tuple[str, int | None], Tensor],
        report: PrunedLayerReport,
    ) -> None:
        """Store a finished layer."""
        tensors = {
            _name(Part(key, (), layer, expert)): tensor.contiguous()
            for (key, expert), tensor in edits.items()
        }
        partial = self._file(layer).with_suffix(".writing")
        save_file(tensors, partial, metadata={"report": report.to_json()})
        partial.rename(self._file(layer))

    def report(self, layer: int) -> PrunedLayerReport:
        """What was done to a finished layer."""
        with open_tensors(self._file(layer)) as file:
            return PrunedLayerReport.from_json((file.metadata() or {})["report"])

    def get(self, part: Part) -> Tensor:
        if part.layer is not None and self.has(part.layer):
            with open_tensors(self._file(part.layer)) as file:
                if _name(part) in set(file.keys()):
                    tensor: Tensor = file.get_tensor(_name(part))
                    return tensor
        return self._source.get(part)


def stored_choice(folder: Path, num_layers: int) -> tuple[int, ...] | None:
    """Which of `num_layers` an interrupted run has chosen to keep; None if it has not.

    Raises BadInput if the file does not say so.
    """
    file = folder / "kept_layers.json"
    if not file.is_file():
        return None
    with file_of_interrupted_run(file):
        kept = msgspec.json.decode(file.read_bytes(), type=tuple[int, ...])
        if not all(a < b for a, b in pairwise((-1, *kept, num_layers))):
            raise ValueError(f"it does not list layers of 0 to {num_layers - 1} in order")
    return kept


def store_choice(folder: Path, layers: Sequence[int]) -> None:
    """Note which layers are kept."""
    partial = folder / "kept_layers.writing"
    partial.write_text(json.dumps(list(layers)), encoding="utf-8")
    partial.rename(folder / "kept_layers.json")
