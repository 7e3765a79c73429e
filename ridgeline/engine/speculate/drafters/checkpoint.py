"""Trained drafters on disk: a folder with `drafter.json` and `model.safetensors`.

`drafter.json` holds the kind, the sizes, and a fingerprint of the target's hidden space (its final
norm, which quantisation leaves unchanged and a rotation does not). A drafter serves all quantised
forms of its model; another model is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from ridgeline.engine.checkpoints.safetensors import SINGLE, open_tensors, read_header
from ridgeline.engine.dtype import DTYPES
from ridgeline.engine.model.decoder import Decoder
from ridgeline.errors import DECODE_ERRORS, BadModel, CannotRun
from ridgeline.modelspec.model import ModelSpec

CONFIG = "drafter.json"
_TRAIN = "make one: ridgeline train-drafter MODEL --kind {kind} --output DIR"


class DrafterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `drafter.json`. `num_heads`: of medusa. `layer`: the shape of eagle's layer.
    `made`: how it was trained, for information.
    """

    kind: str
    hidden_size: int
    vocab_size: int
    target: str
    num_heads: int = 0
    layer: dict[str, Any] = {}
    made: dict[str, Any] = {}


def drafter_path(name: str, kind: str) -> Path:
    """The folder of a drafter. Raises BadModel."""
    path = Path(name).expanduser()
    for file in (path / CONFIG, path / SINGLE):
        if not file.is_file():
            raise BadModel(
                f"there is no trained drafter: {file.name} is missing",
                value=name,
                fix=_TRAIN.format(kind=kind),
            )
    return path


def read_config(name: str, kind: str) -> DrafterConfig:
    """The config of a drafter of that kind. Raises BadModel."""
    file = drafter_path(name, kind) / CONFIG
    try:
        found = msgspec.json.decode(file.read_bytes(), type=DrafterConfig)
    except DECODE_ERRORS as error:
        raise BadModel(f"{CONFIG} cannot be read: {error}", value=name) from None
    if found.kind != kind:
        raise BadModel(
            "the drafter is of another kind",
            value=f"{name}: {found.kind}",
            limit=kind,
            fix=f'use {{"method": "{found.kind}", …}}',
        )
    return found


def check_sizes(config: DrafterConfig, target: ModelSpec, name: str) -> None:
    """Raise CannotRun if the sizes do not fit this model; cheap, before weights are loaded."""
    theirs = config.hidden_size, config.vocab_size
    ours = target.hidden_size, target.vocab_size
    if theirs != ours:
        raise CannotRun(
            "the drafter was trained for another model",
            value=f"{name}: hidden size {theirs[0]}, vocabulary {theirs[1]}",
            limit=f"hidden size {ours[0]}, vocabulary {ours[1]}",
            fix=_TRAIN.format(kind=config.kind),
        )


def check_target(config: DrafterConfig, decoder: Decoder, name: str) -> None:
    """Raise CannotRun if the sizes fit but the drafter was trained for another model."""
    own = fingerprint(decoder)
    if config.target != own:
        raise CannotRun(
            "the drafter was trained for another model of the same sizes",
            value=f"{name}: for {config.target}",
            limit=own,
            fix=_TRAIN.format(kind=config.kind),
        )


def fingerprint(decoder: Decoder) -> str:
    """Fingerprint of the space of last hidden states: the gain of the final norm."""
    gain_C = getattr(decoder.norm, "gain_C", torch.ones(decoder.spec.hidden_size))
    numbers = gain_C.detach().float().cpu().to(torch.bfloat16).view(torch.int16).numpy()
    return hashlib.sha256(numbers.tobytes()).hexdigest()[:16]


def read_tensors(
    name: str, kind: str, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The drafter's tensors, exactly those in `shapes`. Raises BadModel."""
    file = drafter_path(name, kind) / SINGLE
    found = {tensor: entry.shape for tensor, entry in read_header(file).items()}
    if found != dict(shapes):
        differing = sorted(k for k in found.keys() | shapes.keys() if found.get(k) != shapes.get(k))
        raise BadModel(
            "the drafter's tensors do not match its config",
            value=f"{name}: {differing[0]} is {found.get(differing[0], 'missing')}",
            limit=shapes.get(differing[0], "not there"),
        )
    with open_tensors(file) as contexts:
        return {tensor: contexts.get_tensor(tensor).to(dtype) for tensor in shapes}


def weight_bytes(name: str, kind: str, dtype: str) -> int:
    """Bytes of the drafter's tensors in `dtype`."""
    entries = read_header(drafter_path(name, kind) / SINGLE).values()
    return sum(math.prod(entry.shape) for entry in entries) * DTYPES[dtype].itemsize


def write_drafter(folder: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> int:
    """Write a drafter in bfloat16; returns the bytes of its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in tensors.items()}
    save_file(kept, folder / SINGLE, metadata={"format": "pt"})
    text = json.dumps(msgspec.to_builtins(config), indent=1)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
    return sum(tensor.nbytes for tensor in kept.values())
