"""Checkpoints of unquantised weights, as their family's are; 2:4 sparse ones compressed if wanted.

One shard per layer, so that one layer is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.compress.writers.safetensors import names_by_shard, save_shards, tensor_names
from ridgeline.engine.checkpoints.codecs.sparse24 import compress_24
from ridgeline.engine.checkpoints.sources import WeightSource
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.engine.checkpoints.write_packed import copy_config
from ridgeline.engine.dtype import DTYPES
from ridgeline.modelspec.model import ModelSpec


class DenseCheckpoint(NamedTuple):
    """What to write: weights of `spec`, named as in the folder `source`.

    `changes`: fields of config.json that differ from the source's. `sparse`: store the linears of
    all layers, which are 2:4 sparse, compressed.
    """

    source: Path
    spec: ModelSpec
    weights: WeightSource
    changes: Mapping[str, Any]
    sparse: bool = False


def write_dense(checkpoint: DenseCheckpoint, folder: Path) -> int:
    """Write config, tokenizer files and shards into `folder`; returns the bytes of tensors."""
    source, spec = checkpoint.source, checkpoint.spec
    config = _SPARSE_CONFIG if checkpoint.sparse else None
    copy_config(source, folder, spec, config, checkpoint.changes)
    names = tensor_names(source, spec)

    def shard(inside: Sequence[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in inside:
            found |= _tensors_of(checkpoint, name, names[name])
        return found

    return save_shards(folder, names_by_shard(names), shard)


_SPARSE_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "quantization_status": "compressed",
    "config_groups": {},
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "global_compression_ratio": None,
    "sparsity_config": {
        "format": "sparse-24-bitmask",
        "sparsity_structure": "2:4",
        "global_sparsity": 0.5,
        "targets": ["Linear"],
        "ignore": ["lm_head"],
        "registry_requires_subclass": False,
    },
}


def _tensors_of(
    checkpoint: DenseCheckpoint, name: str, inside: Sequence[Part]
) -> dict[str, Tensor]:
    values = [checkpoint.weights.get(part) for part in inside]
    whole = values[0] if len(values) == 1 else torch.cat(values)
    whole = whole.to(DTYPES[checkpoint.spec.stored_dtype]).contiguous()
    part = inside[0]
    linear = part.layer is not None and len(part.shape) == 2 and "router" not in part.key
    if not checkpoint.sparse or not linear:
        return {name: whole}
    module = name.removesuffix(".weight")
    return {module + suffix: tensor for suffix, tensor in compress_24(whole).items()}
