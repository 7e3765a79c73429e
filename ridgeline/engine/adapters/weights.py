"""Reads an adapter's tensors: safetensors as PEFT writes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.engine.adapters.modules import modules_of
from ridgeline.engine.adapters.peft_config import AdapterConfig, read_adapter_config
from ridgeline.engine.checkpoints.safetensors import TensorEntry, open_tensors, read_header
from ridgeline.errors import BadInput, BadModel, CannotRun
from ridgeline.modelspec.checkpoints.json_files import file_errors
from ridgeline.modelspec.cost.adapters import adapted_linears
from ridgeline.modelspec.model import ModelSpec

WEIGHTS_FILE = "adapter_model.safetensors"
_TENSOR = re.compile(r"(?:.*\.)?(layers\.\d+\..+)\.lora_(A|B)(?:\.default)?\.weight")


class LowRank(NamedTuple):
    """What is added to the weight of one linear: up_OR @ down_RI; `up` holds the scale."""

    down_RI: Tensor
    up_OR: Tensor


AdapterWeights = dict[tuple[int, str], LowRank]
"""By layer and key of the linear. Linears that are one module of the checkpoint share `down_RI`."""


@file_errors()
def read_adapter(directory: Path, spec: ModelSpec, max_rank: int) -> AdapterWeights:
    """The adapter's weights in float32.

    Raises BadModel for damaged files, CannotRun for modules and fields that are not supported,
    BadInput for a rank above `max_rank`.
    """
    config = read_adapter_config(directory)
    if config.rank > max_rank:
        raise BadInput(
            "the adapter's rank exceeds --max-lora-rank",
            value=config.rank,
            limit=max_rank,
            fix=f"serve with --max-lora-rank {config.rank}",
        )
    if not (directory / WEIGHTS_FILE).is_file():
        raise BadModel(
            "the adapter's directory has no safetensors",
            value=", ".join(sorted(child.name for child in directory.iterdir()))[:200],
            limit=WEIGHTS_FILE,
            fix="save it with safe_serialization=True: loading a pickle runs code",
        )
    entries = read_header(directory / WEIGHTS_FILE)
    pairs = _pairs(entries, spec)
    weights: AdapterWeights = {}
    modules = modules_of(spec)
    with open_tensors(directory / WEIGHTS_FILE) as tensors:
        for path, names in pairs.items():
            module = modules[path]
            linears = adapted_linears(spec.layers[module.layer])
            rows = [linears[key].num_out for key in module.keys]
            num_in = linears[module.keys[0]].num_in
            shapes = {"A": (config.rank, num_in), "B": (sum(rows), config.rank)}
            _check(names, shapes, entries)
            down_RI, up_OR = (tensors.get_tensor(names[half]).float() for half in ("A", "B"))
            _check_finite(path, down_RI, up_OR)
            weights |= _parts(module.layer, module.keys, rows, (down_RI, up_OR), config)
    return weights


def _pairs(entries: dict[str, TensorEntry], spec: ModelSpec) -> dict[str, dict[str, str]]:
    """Tensor names "A" and "B" by the module's path."""
    known, pairs = modules_of(spec), dict[str, dict[str, str]]()
    for name in sorted(entries):
        match = _TENSOR.fullmatch(name)
        if match is None or match[1] not in known:
            raise CannotRun(
                "the adapter has a tensor of a module that adapters cannot be added to",
                value=name[:120],
                limit=", ".join(dict.fromkeys(path.split(".", 2)[2] for path in known)),
                fix="merge the adapter into its base model, and serve that",
            )
        pairs.setdefault(match[1], {})[match[2]] = name
    for path, names in pairs.items():
        if len(names) != 2:
            raise BadModel("the adapter has only one half of a module", value=path)
    if not pairs:
        raise BadModel("the adapter has no weights", value=WEIGHTS_FILE)
    return pairs


def _check(
    names: dict[str, str], shapes: dict[str, tuple[int, int]], entries: dict[str, TensorEntry]
) -> None:
    for half, shape in shapes.items():
        if entries[names[half]].shape != shape:
            raise BadModel(
                f"the adapter does not fit the base model: {names[half]}",
                value=str(list(entries[names[half]].shape)),
                limit=str(list(shape)),
                fix="use the base model that the adapter was trained on",
            )


def _check_finite(path: str, *halves: Tensor) -> None:
    if not all(bool(half.isfinite().all()) for half in halves):
        raise BadModel("the adapter has weights that are not finite", value=path)


def _parts(
    layer: int,
    keys: tuple[str, ...],
    rows: list[int],
    halves: tuple[Tensor, Tensor],
    config: AdapterConfig,
) -> AdapterWeights:
    down_RI, up_OR = halves
    scaled = (up_OR.double() * config.scale).to(torch.float32).split(rows)
    return {(layer, key): LowRank(down_RI, up) for key, up in zip(keys, scaled, strict=True)}
