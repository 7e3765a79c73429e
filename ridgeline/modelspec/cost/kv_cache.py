"""Bytes of KV cache that a spec needs."""

from __future__ import annotations

from ridgeline.modelspec.format import BYTES_OF_KV, KV_GROUP, KV_SCALE_BYTES
from ridgeline.modelspec.model import AttentionSpec, ModelSpec


def layer_kv_bytes(attention: AttentionSpec, kv_dtype: str) -> int:
    """Bytes of one token's keys and values as one layer reads them."""
    if attention.latent is not None:
        return _row_bytes(attention.latent.rank + attention.latent.rope_dim, kv_dtype)
    return 2 * attention.num_kv_heads * _row_bytes(attention.head_dim, kv_dtype)


def _row_bytes(size: int, kv_dtype: str) -> int:
    if kv_dtype == "int4":  # half a byte per number, and the range of every KV_GROUP numbers
        return -(-size // KV_GROUP) * (KV_GROUP // 2 + 4)
    return int(size * BYTES_OF_KV[kv_dtype]) + KV_SCALE_BYTES.get(kv_dtype, 0)


def kv_bytes_per_token(spec: ModelSpec) -> int:
    """Bytes of KV cache that one more token needs in all layers, while windows are not full."""
    return sum(
        layer_kv_bytes(layer.attention, spec.kv_dtype)
        for layer in spec.layers
        if not layer.attention.shares_kv
    )


def kv_bytes(spec: ModelSpec, context: int) -> int:
    """Bytes of KV cache that one sequence of `context` tokens can still read.

    A window W reads min(context, W). An engine holds whole blocks (`KvLayout.held_bytes`).
    """
    total = 0
    for layer in spec.layers:
        attention = layer.attention
        if not attention.shares_kv:
            kept = min(context, attention.window or context)
            total += kept * layer_kv_bytes(attention, spec.kv_dtype)
    return total


def state_bytes(spec: ModelSpec) -> int:
    """Bytes of the states that one sequence keeps in recurrent layers, whatever its length."""
    deltas = [layer.attention.delta for layer in spec.layers]
    return 4 * sum(delta.state_size for delta in deltas if delta is not None)


def has_states(spec: ModelSpec) -> bool:
    """Whether sequences keep states that are not in the KV cache."""
    return any(layer.attention.delta is not None for layer in spec.layers)


def why_not_int4_kv(spec: ModelSpec) -> str:
    """Why the model's keys and values cannot be stored in INT4; "" if they can."""
    attentions = [layer.attention for layer in spec.layers]
    if any(a.delta is not None or a.shares_kv for a in attentions):
        return "some of its layers have no KV cache"
    if any(a.latent is not None or a.chunk is not None for a in attentions):
        return "latent attention and attention in chunks have no groups of keys"
    if len({(a.num_kv_heads, a.head_dim) for a in attentions}) > 1:
        return "its layers differ in the size of their keys"
    if attentions and attentions[0].head_dim % KV_GROUP:
        return f"its heads of {attentions[0].head_dim} are not multiples of {KV_GROUP} channels"
    return ""
