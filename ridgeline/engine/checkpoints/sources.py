"""Sources of weights: a checked safetensors checkpoint, or random numbers made fast.

Either gives a decoder's part as a tensor on the CPU that nothing else writes to, and of exactly the
shape that the spec asks for.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ridgeline.engine.checkpoints.safetensors import Entry, entries_of, open_tensors
from ridgeline.engine.checkpoints.tensor_names import (
    IGNORED,
    LAYOUTS,
    Layout,
    Located,
    Part,
    locate,
    parts,
    row_sizes,
)
from ridgeline.engine.dtype import DTYPES
from ridgeline.engine.kernels.native_linear import Packed
from ridgeline.engine.quant.packed import random_packed
from ridgeline.engine.quant.ready import Ready
from ridgeline.errors import BadModel
from ridgeline.modelspec.model import LinearSpec, ModelSpec


class Weights(Protocol):
    """Where a decoder's tensors come from."""

    def get(self, part: Part) -> Tensor:
        """The part, on the CPU, in the source's dtype."""
        ...

    def packed(
        self, spec: LinearSpec, keys: Sequence[str], layer: int | None, expert: int | None
    ) -> Ready | None:
        """The product of `keys` side by side, ready-made in the format of `spec`.

        None where the source holds plain weights.
        """
        ...


class PlainWeights(ABC):
    """A source that holds plain weights alone, or makes them of another's."""

    @abstractmethod
    def get(self, part: Part) -> Tensor:
        """See `Weights`."""

    def packed(
        self, spec: LinearSpec, keys: Sequence[str], layer: int | None, expert: int | None
    ) -> Ready | None:
        """None: nothing is packed here."""
        return None


class CheckpointWeights(PlainWeights):
    """The tensors of a model directory. Everything is checked on entry; data is read part by part.

    A context manager: the files are mapped while it is open. Raises BadModel for missing,
    unexpected or misshapen tensors, and names them.
    """

    def __init__(self, directory: Path, spec: ModelSpec) -> None:
        self.entries = entries_of(directory)
        self.located = match(spec, self.entries)
        self.files: dict[Path, Any] = {}
        self.stack = ExitStack()

    def __enter__(self) -> CheckpointWeights:
        for file in {entry.file for entry in self.entries.values()}:
            self.files[file] = self.stack.enter_context(open_tensors(file))
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()
        self.files.clear()

    def get(self, part: Part) -> Tensor:
        at = self.located[part]
        file = self.files[self.entries[at.name].file]
        if at.rows is None and at.expert is None:
            whole: Tensor = file.get_tensor(at.name)
            return whole.clone()
        view = file.get_slice(at.name)
        rows = at.rows or slice(None)
        piece: Tensor = view[rows] if at.expert is None else view[at.expert, rows]
        return piece.clone()


def match(spec: ModelSpec, entries: Mapping[str, Entry]) -> dict[Part, Located]:
    """Where every part of `spec` lies among `entries`; BadModel names what is amiss."""
    wanted = list(parts(spec))
    sizes = [row_sizes(layer) for layer in spec.layers]

    def located(layout: Layout) -> dict[Part, Located]:
        return {p: locate(p, layout, sizes[p.layer] if p.layer is not None else {}) for p in wanted}

    found = min(
        (located(layout) for layout in LAYOUTS[spec.family]),
        key=lambda at: sum(1 for place in at.values() if place.name not in entries),
    )
    _check(spec, found, entries)
    return found


def _check(spec: ModelSpec, found: Mapping[Part, Located], entries: Mapping[str, Entry]) -> None:
    missing = [place.name for place in found.values() if place.name not in entries]
    if missing:
        raise BadModel(
            f"the checkpoint lacks {len(set(missing))} tensor(s) that its config promises",
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
    unexpected = sorted(
        name
        for name in entries
        if name not in known | tied and not any(mark in name for mark in IGNORED)
    )
    if unexpected:
        raise BadModel(
            f"the checkpoint holds {len(unexpected)} tensor(s) that its config does not explain",
            value=unexpected[0],
            fix="check that config.json belongs to these weights",
        )


class DummyWeights:
    """Random weights for speed-only work: one block of normal numbers, cut and tiled everywhere.

    Making every number afresh takes a minute for a few billion; copying a block runs at the speed
    of memory. Deterministic by seed and part; norms are 1 (stored as 0 where the gain is 1 + w).
    """

    BLOCK = 1_048_583  # prime, so that no matrix repeats a row

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self.seed, self.norm = seed, 0.0 if spec.norm_plus_one else 1.0
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(self.BLOCK, generator=generator) * 0.02
        self.block = normal.to(
            DTYPES[spec.stored_dtype]
        ).float()  # numbers that the file could hold

    def get(self, part: Part) -> Tensor:
        if part.key.endswith("norm"):
            return torch.full(part.shape, self.norm)
        size = 1
        for extent in part.shape:
            size *= extent
        start = zlib.crc32(f"{self.seed} {part}".encode()) % self.BLOCK
        out = torch.empty(size)
        at = 0
        while at < size:
            piece = self.block[start : start + size - at]
            out[at : at + len(piece)] = piece
            at, start = at + len(piece), 0
        return out.view(part.shape)

    def packed(
        self, spec: LinearSpec, keys: Sequence[str], layer: int | None, expert: int | None
    ) -> Packed | None:
        """Random packed weights, of about the size of the dense ones; None for other formats."""
        seed = zlib.crc32(f"{self.seed} {keys} {layer} {expert}".encode())
        return random_packed(spec, torch.Generator().manual_seed(seed))
