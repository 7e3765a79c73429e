"""A quantised checkpoint as a weight source: decoded part by part, packed where kernels fit.

Quantised modules appear among the plain tensors as if each held one dense weight, so names, shapes,
fused tensors and experts are matched by the code that reads plain checkpoints. The model is never
dense as a whole: one product is decoded, packed and dropped at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.engine.checkpoints.codecs.base import Codec, codec_for, contradiction
from ridgeline.engine.checkpoints.safetensors import (
    ALL,
    FLOATS,
    TensorEntry,
    entries_of,
    open_tensors,
)
from ridgeline.engine.checkpoints.sources import match
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.engine.kernels.native_linear import Packed
from ridgeline.engine.quant.grid import Grid, in_order, pack, refusal, stack_grids
from ridgeline.engine.quant.ordered import OrderedPacked
from ridgeline.errors import BadModel, CannotRun
from ridgeline.modelspec.checkpoints.json_files import read_json
from ridgeline.modelspec.checkpoints.quantised import QuantisedCheckpoint, module_of
from ridgeline.modelspec.checkpoints.quantization_config import (
    quantization_config_of,
    read_quantization_config,
    with_outer_quantization,
)
from ridgeline.modelspec.model import LinearSpec, ModelSpec


def read_quantisation(directory: Path) -> QuantisedCheckpoint | None:
    """How the checkpoint in a directory is quantised; None if it is not."""
    config = with_outer_quantization(read_json(directory / "config.json"))
    quantization = quantization_config_of(directory, config)
    return None if quantization is None else read_quantization_config(quantization, str(directory))


class QuantizedWeights:
    """The weights of a quantised checkpoint.

    A context manager like its siblings. Raises BadModel.
    """

    def __init__(self, directory: Path, spec: ModelSpec, foreign: QuantisedCheckpoint) -> None:
        self._foreign, self._codecs = foreign, dict[QuantisedCheckpoint, Codec]()
        self._entries = entries_of(directory, ALL)
        self._modules: dict[str, dict[str, TensorEntry]] = {}
        self._spec, self._files, self._stack = spec, dict[Path, Any](), ExitStack()

    def __enter__(self) -> QuantizedWeights:
        for file in {entry.file for entry in self._entries.values()}:
            self._files[file] = self._stack.enter_context(open_tensors(file))
        self._modules = self._found_modules()
        self._located = match(self._spec, self._as_if_dense(), self._is_zero)
        self._parts = {(part.key, part.layer, part.expert): part for part in self._located}
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._files.clear()

    def _is_zero(self, name: str) -> bool:
        return not bool(self._files[self._entries[name].file].get_tensor(name).any())

    def _codec(self, module: str) -> Codec:
        own = self._foreign.at(module)
        if own not in self._codecs:
            self._codecs[own] = codec_for(own)
        return self._codecs[own]

    def _found_modules(self) -> dict[str, dict[str, TensorEntry]]:
        names = {found for name in self._entries if (found := module_of(name)) is not None}
        modules: dict[str, dict[str, TensorEntry]] = {name: {} for name in names}
        for name, entry in self._entries.items():
            at = name.find(".weight.") if ".weight." in name else name.rfind(".")
            if name[:at] in modules and self._codec(name[:at]).belongs(name[at:]):
                modules[name[:at]][name[at:]] = entry
        return modules

    def _as_if_dense(self) -> dict[str, TensorEntry]:
        raw = {m + suffix for m, entries in self._modules.items() for suffix in entries}
        plain = {name: entry for name, entry in self._entries.items() if name not in raw}
        for name, entry in plain.items():
            if entry.dtype not in FLOATS:
                raise BadModel(
                    f"tensor {name} is neither plain nor explained by the quantization_config",
                    value=entry.dtype,
                )
        for module, entries in self._modules.items():
            shape = self._codec(module).shape(entries, self._reader(module))
            plain[f"{module}.weight"] = next(iter(entries.values()))._replace(shape=shape)
        return plain

    def _reader(self, module: str) -> Callable[[str], Tensor]:
        def read(suffix: str) -> Tensor:
            entry = self._modules[module].get(suffix)
            if entry is None:
                raise BadModel(f"the quantised module {module} lacks a tensor", value=suffix)
            tensor: Tensor = self._files[entry.file].get_tensor(module + suffix)
            return tensor

        return read

    def _decode(self, part: Part) -> Grid | Tensor | None:
        """The part's rows of its module; None if it is not quantised."""
        at = self._located[part]
        module = at.name.removesuffix(".weight")
        if not at.name.endswith(".weight") or module not in self._modules:
            return None
        has: Mapping[str, TensorEntry] = self._modules[module]
        whole = self._codec(module).decode(
            (at.whole[0], at.whole[1]), lambda suffix: suffix in has, self._reader(module)
        )
        if at.rows is None:
            return whole
        if isinstance(whole, Tensor):
            return at.select(whole)
        zero = None if whole.zero_OG is None else at.select(whole.zero_OG)
        return replace(
            whole,
            q_OI=at.select(whole.q_OI),
            scale_OG=at.select(whole.scale_OG),
            zero_OG=zero,
        )

    def grid(self, part: Part) -> Grid | None:
        """The part's grid; None if it has none."""
        found = self._decode(part)
        return found if isinstance(found, Grid) else None

    def get(self, part: Part) -> Tensor:
        found = self._decode(part)
        if isinstance(found, Grid):
            return found.dense()
        return self._plain(part) if found is None else found

    def _plain(self, part: Part) -> Tensor:
        at = self._located[part]
        return at.read(self._files[self._entries[at.name].file])

    def packed(
        self, spec: LinearSpec, keys: Sequence[str], layer: int | None, expert: int | None
    ) -> Packed | OrderedPacked | None:
        """The product of `keys` on its own grid; None if it must be computed dense."""
        if spec.format.kind == "dense":
            return None
        grids = [grid for key in keys if (grid := self._grid_of(key, layer, expert)) is not None]
        if not grids:
            return None
        if len(grids) < len(keys):
            raise CannotRun(
                "only some of the weights that are computed together are quantised",
                value=" + ".join(keys),
            )
        ready = _pack_together(grids, f"{'+'.join(keys)} of layer {layer}")
        if isinstance(ready, OrderedPacked) and not spec.format.ordered:
            raise contradiction("inputs in act-order", "scattered groups", "desc_act: false")
        if spec.format.ordered and isinstance(ready, Packed):
            return OrderedPacked(ready, torch.arange(ready.num_in))
        return ready

    def _grid_of(self, key: str, layer: int | None, expert: int | None) -> Grid | None:
        part = self._parts.get((key, layer, expert))
        return None if part is None else self.grid(part)


def _pack_together(grids: Sequence[Grid], where: str) -> Packed | OrderedPacked:
    sorted_grids = [in_order(grid) for grid in grids]
    orders = [order for _, order in sorted_grids]
    first = orders[0]
    alike = all(
        (order is None and first is None)
        or (order is not None and first is not None and torch.equal(order, first))
        for order in orders
    )
    if not alike:
        raise CannotRun("weights computed together have different act-orders", value=where)
    grid = stack_grids([grid for grid, _ in sorted_grids])
    why = refusal(grid)
    if why is not None:
        raise CannotRun(f"{where} cannot be computed packed: {why}")
    packed = pack(grid)
    return packed if first is None else OrderedPacked(packed, first)
