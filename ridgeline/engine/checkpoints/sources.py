"""Weight sources: a checked safetensors checkpoint, or random numbers generated quickly.

Each returns a part of the decoder as a CPU tensor of exactly the shape in the spec.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from ridgeline.engine.checkpoints.family_layouts import Layout
from ridgeline.engine.checkpoints.safetensors import TensorEntry, entries_of, open_tensors
from ridgeline.engine.checkpoints.tensor_names import (
    LocatedTensor,
    Part,
    layouts_of,
    locate,
    parts,
    row_sizes,
)
from ridgeline.engine.checkpoints.unread_tensors import (
    HARMLESS_TENSORS,
    prediction_layers,
    unused_tensors,
)
from ridgeline.engine.dtype import DTYPES
from ridgeline.engine.kernels.native_linear import Packed
from ridgeline.engine.quant.packed import random_packed
from ridgeline.engine.quant.ready import Ready
from ridgeline.errors import BadModel
from ridgeline.modelspec.model import LinearSpec, ModelSpec

CPU = torch.device("cpu")


class WeightSource(Protocol):
    """Where a decoder's tensors come from."""

    def get(self, part: Part) -> Tensor:
        """The part, on the CPU, in the source's dtype."""
        ...

    def packed(
        self, spec: LinearSpec, keys: Sequence[str], layer: int | None, expert: int | None
    ) -> Ready | None:
        """The product of `keys` side by side, already packed in the format of `spec`.

        None if the source holds plain weights.
        """
        ...


class PlainWeights(ABC):
    """A source of plain weights only."""

    @abstractmethod
    def get(self, part: Part) -> Tensor:
        """The part, on the CPU, in the source's dtype."""

    def packed(
        self, spec: LinearSpec, keys: Sequence[str], layer: int | None, expert: int | None
    ) -> Ready | None:
        """None: this source has no packed weights."""
        return None


class CheckpointWeights(PlainWeights):
    """The tensors of a model directory. Everything is checked on entry; data is read part by part.

    A context manager: files are mapped while it is open. Raises BadModel naming missing, unexpected
    or misshapen tensors.
    """

    def __init__(self, directory: Path, spec: ModelSpec) -> None:
        self.entries: dict[str, TensorEntry] = {}
        self.located = self._located(directory, spec)
        self.files: dict[Path, Any] = {}
        self.stack = ExitStack()

    def _located(self, directory: Path, spec: ModelSpec) -> dict[Part, LocatedTensor]:
        """Set `entries`, and return where each part is."""
        self.entries = entries_of(directory)
        return match(spec, self.entries, self._is_zero)

    def __enter__(self) -> Self:
        for file in {entry.file for entry in self.entries.values()}:
            self.files[file] = self.stack.enter_context(open_tensors(file))
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()
        self.files.clear()

    def _is_zero(self, name: str) -> bool:
        with open_tensors(self.entries[name].file) as file:
            return not bool(file.get_tensor(name).any())

    def get(self, part: Part) -> Tensor:
        at = self.located[part]
        file = self.files[self.entries[at.name].file]
        if at.rows is None and at.expert is None:
            whole: Tensor = file.get_tensor(at.name)
            return whole.clone()
        return at.read(file)


def match(
    spec: ModelSpec,
    entries: Mapping[str, TensorEntry],
    is_zero: Callable[[str], bool] = lambda name: False,
) -> dict[Part, LocatedTensor]:
    """The location of every part of `spec` among `entries`. Raises BadModel naming what is wrong.

    `is_zero` reads a tensor: biases that the config does not explain are harmless if all are zero.
    """
    wanted = list(parts(spec))
    sizes = [row_sizes(layer) for layer in spec.layers]

    def located(layout: Layout) -> dict[Part, LocatedTensor]:
        return {p: locate(p, layout, sizes[p.layer] if p.layer is not None else {}) for p in wanted}

    def misfits(at: Mapping[Part, LocatedTensor]) -> tuple[int, int]:
        """How many parts are missing, and how many have another shape."""
        there = [place for place in at.values() if place.name in entries]
        wrong = sum(1 for place in there if entries[place.name].shape != place.whole)
        return len(at) - len(there), wrong

    found = min((located(layout) for layout in layouts_of(spec.family, entries)), key=misfits)
    _check(spec, found, entries, is_zero)
    return found


def _check(
    spec: ModelSpec,
    found: Mapping[Part, LocatedTensor],
    entries: Mapping[str, TensorEntry],
    is_zero: Callable[[str], bool],
) -> None:
    missing = [place.name for place in found.values() if place.name not in entries]
    if missing:
        raise BadModel(
            f"the checkpoint lacks {len(set(missing))} tensor(s) that its config requires",
            value=missing[0],
            fix="check that config.json belongs to these weights",
        )
    for part, place in found.items():
        if entries[place.name].shape != place.whole:
            raise BadModel(
                f"tensor {place.name} ({part}) has another shape than its config says",
                value=list(entries[place.name].shape),
                limit=list(place.whole),
                fix="check that config.json belongs to these weights",
            )
    known = {place.name for place in found.values()}
    tied = {"lm_head.weight", "language_model.lm_head.weight"} if spec.tied_embeddings else set()
    unread, unused = prediction_layers(entries, len(spec.layers)), unused_tensors(spec)
    unexpected = sorted(
        name
        for name in entries
        if name not in known | tied
        and not any(mark in name for mark in HARMLESS_TENSORS)
        and not name.startswith(unread)
        and not any(mark in name for mark in unused)
        and not (name.endswith(".bias") and is_zero(name))
    )
    if unexpected:
        raise BadModel(
            f"the checkpoint holds {len(unexpected)} tensor(s) that its config does not explain",
            value=unexpected[0],
            fix="check that config.json belongs to these weights",
        )


class DummyWeights:
    """Random weights for performance work: one block of normal numbers, cut and tiled everywhere.

    Generating every number takes a minute for a few billion; copying a block runs at memory speed.
    Deterministic by seed and part; norms are 1 (stored as 0 if the gain is 1 + w). On a GPU they
    are made in its memory, in the dtype that the file would have.
    """

    BLOCK = 1_048_583  # prime, so that no matrix repeats a row

    def __init__(self, spec: ModelSpec, seed: int, device: torch.device = CPU) -> None:
        self.seed, self.norm = seed, 0.0 if spec.norm_plus_one else 1.0
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(self.BLOCK, generator=generator) * 0.02
        stored = normal.to(DTYPES[spec.stored_dtype])  # numbers that the file could hold
        self.block = stored.float() if device.type == "cpu" else stored.to(device)

    def get(self, part: Part) -> Tensor:
        if part.key.endswith("norm"):
            return torch.full(part.shape, self.norm, device=self.block.device)
        size = 1
        for extent in part.shape:
            size *= extent
        start = zlib.crc32(f"{self.seed} {part}".encode()) % self.BLOCK
        out = self.block.new_empty(size)
        at = 0
        while at < size:
            piece = self.block[start : start + size - at]
            out[at : at + len(piece)] = piece
            at, start = at + len(piece), 0
        return out.view(part.shape)

    def packed(
        self, spec: LinearSpec, keys: Sequence[str], layer: int | None, expert: int | None
    ) -> Packed | None:
        """Random packed weights of similar magnitude; None for other formats."""
        seed = zlib.crc32(f"{self.seed} {keys} {layer} {expert}".encode())
        return random_packed(spec, torch.Generator().manual_seed(seed))
