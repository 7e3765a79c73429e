"""The keys of a file's architecture, read and checked one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.gguf_header import Gguf

SHARED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
"""Keys that all architectures share, and our config's field for each."""


def keys_of(file: Gguf) -> dict[str, Any]:
    """The architecture's keys without its name; one value where all layers have the same."""
    start = str(file.metadata["general.architecture"]) + "."
    found = {
        key.removeprefix(start): value
        for key, value in file.metadata.items()
        if key.startswith(start)
    }
    return {key: _same(key, value) for key, value in found.items()}


def _same(key: str, value: Any) -> Any:
    if isinstance(value, list) and value and key in SHARED and value.count(value[0]) == len(value):
        return value[0]
    return value


def count(file: Gguf, keys: Mapping[str, Any], key: str) -> int:
    """A key that must be a positive integer. Raises BadModel."""
    value = keys.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        start = file.metadata["general.architecture"]
        raise BadModel(
            f"the GGUF key {start}.{key} is not a positive integer", value=str(value)[:80]
        )
    return value


def heads(file: Gguf, keys: Mapping[str, Any]) -> int:
    """The number of attention heads. Raises BadModel."""
    return count(file, keys, "attention.head_count")
