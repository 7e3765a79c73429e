"""The order of value heads in delta nets of GGUF files (Qwen3.5)."""

from __future__ import annotations

from torch import Tensor

from ridgeline.modelspec.model import DeltaSpec


def heads_of_groups(value: Tensor, key: str, delta: DeltaSpec) -> Tensor:
    """`value` with the value heads of a key head next to each other.

    llama.cpp's converter of Qwen3.5 puts the first value head of every key head first, then the
    second of every one, so that its operators can repeat the keys. `key`: the part (delta_o has the
    heads along its inputs, delta_conv after the channels of q and k).
    """
    if key in ("delta_q", "delta_k", "delta_gain"):
        return value
    if key == "delta_o":
        return _rows(value.T, delta).T.contiguous()
    if key == "delta_conv":
        keys = 2 * delta.num_key_heads * delta.key_dim
        out = value.clone()
        out[keys:] = _rows(value[keys:], delta)
        return out
    return _rows(value, delta)


def _rows(value: Tensor, delta: DeltaSpec) -> Tensor:
    times = delta.num_value_heads // delta.num_key_heads
    tiled = value.reshape(times, delta.num_key_heads, -1, *value.shape[1:])
    return tiled.transpose(0, 1).reshape(value.shape)
