"""How several models of one server share the memory that their weights leave."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ridgeline.config.settings import Settings
from ridgeline.errors import DoesNotFit

CACHE_SHARE = 0.5
"""Of the memory that all weights leave: the share of the KV caches, as with one model."""
_MULTIPLE = 256  # to which a context is rounded down that the share does not hold


def share_memory(settings: Sequence[Settings]) -> list[Settings]:
    """Settings with a KV cache size each, where it was not requested.

    Each model gets what it would have alone or, where the sum is too large, a part in proportion.
    A context that was not requested is lowered to what its cache holds. Raises DoesNotFit.
    """
    from ridgeline.engine.config import resolve
    from ridgeline.hardware import system
    from ridgeline.modelspec.cost import kv_bytes_per_token, resident_weight_bytes

    alone = [resolve(own) for own in settings]
    weight_bytes = sum(int(resident_weight_bytes(own.spec)) for own in alone)
    available = system.memory().available_bytes
    if weight_bytes >= available:
        raise DoesNotFit(
            "the weights of the models do not fit together",
            value=f"{weight_bytes / 2**30:.1f} GiB",
            limit=f"{available / 2**30:.1f} GiB available",
            fix="serve fewer models, or quantise them",
        )
    cache_bytes = sum(own.kv_cache_memory_bytes for own in alone)
    factor = min(1.0, CACHE_SHARE * (available - weight_bytes) / cache_bytes)
    shared = []
    for own, found in zip(settings, alone, strict=True):
        nbytes, context = int(factor * found.kv_cache_memory_bytes), own.max_model_len
        if own.kv_cache_memory_bytes is not None:
            nbytes = own.kv_cache_memory_bytes
        if context is None:
            held = nbytes // max(1, kv_bytes_per_token(found.spec))
            fits = held if held < found.max_model_len else found.max_model_len
            context = fits if fits < _MULTIPLE else fits // _MULTIPLE * _MULTIPLE
        shared.append(replace(own, kv_cache_memory_bytes=nbytes, max_model_len=context))
    return shared
