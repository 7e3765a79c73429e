"""Finished layers of a quantisation on disk: an interruption loses one layer's work.

  OUT.partial/run.json            the recipe and source; remains of another run are refused
  OUT.partial/lock                held by the process that works there
  OUT.partial/layer-00003.safetensors
      q.q uint8 [O, I] · q.scale float32 [O, G] · q.zero uint8 [O, G], or none
      q.coded.<suffix>                weights in another layout, as in the format's file
      q.columns int64 [W] · q.wide [O, W]     inputs kept separate from the grid
      keep.attention_norm float32     tensors changed by balancing or rotating
  OUT.partial/result/             the model being written; renamed to OUT when complete

Pruning and distillation keep their finished work in such a folder, too.

A layer's file is written under another name and renamed, so a file that exists is complete.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ridgeline.compress.formats.coded import CodedWeight
from ridgeline.compress.formats.lattice import Rounded
from ridgeline.compress.recipe import QuantizeRecipe
from ridgeline.compress.unfinished import file_of_interrupted_run, open_tensors
from ridgeline.engine.checkpoints.sources import WeightSource
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.engine.kernels.native_linear import Packed
from ridgeline.engine.quant.grid import Grid, pack, stack_grids
from ridgeline.engine.quant.outliers import OutlierPacked, OutlierSplit, pack_split
from ridgeline.errors import DECODE_ERRORS, BadInput
from ridgeline.modelspec.model import LinearSpec, ModelSpec

_RUN = "run.json"


def refuse_output(output: Path) -> None:
    """Raise BadInput if the output exists: nothing is overwritten."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise BadInput(
            "the output is there and is not an empty directory",
            value=str(output),
            fix="name another --output; nothing is overwritten",
        )


@contextmanager
def open_folder(output: Path, run: Mapping[str, Any]) -> Iterator[Path]:
    """Open `OUTPUT.partial`: new, of the same run, or of one that has finished nothing; locked
    meanwhile.

    Raises BadInput if that is impossible, and if the output exists.
    """
    refuse_output(output)
    folder = output.with_name(output.name + ".partial")
    folder.mkdir(parents=True, exist_ok=True)
    with _lock_folder(folder):
        _claim(folder, run)
        yield folder


def new_result(folder: Path) -> Path:
    """An empty folder within `folder` for the model to be written."""
    result = folder / "result"
    shutil.rmtree(result, ignore_errors=True)
    result.mkdir()
    return result


def publish_result(folder: Path, output: Path) -> None:
    """Rename the complete result to `output`, and remove `folder`."""
    if output.is_dir():
        output.rmdir()  # it was empty
    (folder / "result").rename(output)
    shutil.rmtree(folder)


def _claim(folder: Path, run: Mapping[str, Any]) -> None:
    file = folder / _RUN
    text = json.dumps(run, indent=1, sort_keys=True)
    there = None
    if file.is_file():
        with file_of_interrupted_run(file):
            there = file.read_text(encoding="utf-8")
    if there is not None and there != text and (done := len([*folder.glob("*.safetensors")])):
        raise BadInput(
            "a half-made model of another run is in the way",
            value=f"{folder}: {_recipe_of(there)}, {done} files done",
            fix="run that command again to finish it, or delete the folder",
        )
    if there != text:
        writing = folder / f"{_RUN}.writing"
        writing.write_text(text, encoding="utf-8")
        writing.rename(file)


def _recipe_of(text: str) -> str:
    try:
        recipe = json.loads(text)["recipe"]
        return f"--method {recipe['method']}, {recipe['bits']} bits, seed {recipe['seed']}"
    except (KeyError, TypeError, *DECODE_ERRORS):
        return "of another kind"


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; a lock left by a killed process is free again."""
    with (folder / "lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInput(
                "another process is making this model at this moment",
                value=str(folder),
                fix="wait for it, or name another output",
            ) from None
        yield


def _name(part: Part) -> str:
    return part.key if part.expert is None else f"{part.key}.{part.expert}"


class LayerStore:
    """The finished layers; layered over `source`, a weight source like any other."""

    def __init__(
        self, folder: Path, recipe: QuantizeRecipe, spec: ModelSpec, source: WeightSource
    ) -> None:
        self._folder, self._recipe, self._spec, self._source = folder, recipe, spec, source

    def _file(self, layer: int) -> Path:
        return self._folder / f"layer-{layer:05}.safetensors"

    def has(self, layer: int) -> bool:
        return self._file(layer).is_file()

    def save(
        self, layer: int, grids: Mapping[Part, Rounded], kept: Mapping[Part, Tensor], note: str
    ) -> None:
        """Store a finished layer."""
        tensors: dict[str, Tensor] = {f"keep.{_name(p)}": t.contiguous() for p, t in kept.items()}
        for part, grid in grids.items():
            if isinstance(grid, CodedWeight):
                start = f"{_name(part)}.coded"
                tensors |= {start + suffix: t.contiguous() for suffix, t in grid.tensors.items()}
                continue
            if isinstance(grid, OutlierSplit):
                tensors[f"{_name(part)}.columns"] = grid.columns_W.clone()
                tensors[f"{_name(part)}.wide"] = grid.wide_OW.contiguous()
                grid = grid.grid
            tensors[f"{_name(part)}.q"] = grid.q_OI.contiguous()
            tensors[f"{_name(part)}.scale"] = grid.scale_OG.contiguous()
            if grid.zero_OG is not None:
                tensors[f"{_name(part)}.zero"] = grid.zero_OG.contiguous()
        partial = self._file(layer).with_suffix(".writing")
        save_file(tensors, partial, metadata={"note": note})
        partial.rename(self._file(layer))

    def note(self, layer: int) -> str:
        """The notes on a layer, or an empty string."""
        with open_tensors(self._file(layer)) as file:
            return str((file.metadata() or {}).get("note", ""))

    def grid(self, part: Part) -> Grid | None:
        """The grid of a part; None if it is stored otherwise."""
        found = self.rounded(part)
        return found if isinstance(found, Grid) else None

    def rounded(self, part: Part) -> Grid | OutlierSplit | None:
        """The grid of a part, with its separate inputs if any; None if it has no grid."""
        if part.layer is None or not self.has(part.layer):
            return None
        with open_tensors(self._file(part.layer)) as file:
            names, name = set(file.keys()), _name(part)
            if f"{name}.q" not in names:
                return None
            zero = file.get_tensor(f"{name}.zero") if f"{name}.zero" in names else None
            q_OI, scale_OG = (file.get_tensor(f"{name}.{what}") for what in ("q", "scale"))
            apart = [
                file.get_tensor(f"{name}.{what}")
                for what in ("columns", "wide")
                if f"{name}.{what}" in names
            ]
        own = self._recipe.at(part.key, part.layer, q_OI.shape[1])
        grid = Grid(q_OI, scale_OG, zero, own.bits, own.group(q_OI.shape[1]))
        return OutlierSplit(grid, *apart) if apart else grid

    def coded(self, part: Part) -> CodedWeight | None:
        """The part in a coded layout, or None."""
        if part.layer is None or not self.has(part.layer):
            return None
        start = f"{_name(part)}.coded"
        with open_tensors(self._file(part.layer)) as file:
            found = [name for name in set(file.keys()) if name.startswith(start + ".")]
            tensors = {name.removeprefix(start): file.get_tensor(name) for name in found}
        if not tensors:
            return None
        return CodedWeight(self._recipe.numbers, (part.shape[0], part.shape[-1]), tensors)

    def get(self, part: Part) -> Tensor:
        """The dense part of the quantised model."""
        rounded = self.rounded(part) or self.coded(part)
        return self._kept(part) if rounded is None else rounded.dense()

    def _kept(self, part: Part) -> Tensor:
        if part.layer is not None and self.has(part.layer):
            with open_tensors(self._file(part.layer)) as file:
                if f"keep.{_name(part)}" in set(file.keys()):
                    kept: Tensor = file.get_tensor(f"keep.{_name(part)}")
                    return kept
        return self._source.get(part)

    def packed(
        self, spec: LinearSpec, keys: Sequence[str], layer: int | None, expert: int | None
    ) -> Packed | OutlierPacked | None:
        """The product of `keys` in the kernels' layout; None if it must be dense."""
        if spec.format.kind == "dense":
            return None
        found = [self.rounded(Part(key, (), layer, expert)) for key in keys]  # found by name
        splits = [part for part in found if isinstance(part, OutlierSplit)]
        if splits:
            assert len(splits) == len(keys)
            return pack_split(splits)
        grids = [part for part in found if isinstance(part, Grid)]
        return pack(stack_grids(grids)) if grids else None
