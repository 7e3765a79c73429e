"""Registry of attention backends: name -> "module:Class". Nothing is imported until chosen.

A new backend is one file here, one line in `BACKENDS`, and, if it should be chosen by default, its
name in `AUTO` (best first). `reference` is the oracle and is only used if requested by name.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from ridgeline.errors import BadInput, CannotRun
from ridgeline.modelspec.cost.kv_cache import has_states

if TYPE_CHECKING:
    from ridgeline.engine.attention.base import Attention, AttentionBackend, AttentionSite
    from ridgeline.engine.attention.cache import KvCache
    from ridgeline.modelspec.model import ModelSpec

BACKENDS = MappingProxyType(
    {
        "native": "ridgeline.engine.attention.native:NativeAttention",
        "triton": "ridgeline.engine.attention.triton:TritonAttention",
        "flashinfer": "ridgeline.engine.attention.libraries.flashinfer:FlashInferAttention",
        "flex": "ridgeline.engine.attention.libraries.flex:FlexAttention",
        "tables": "ridgeline.engine.attention.tables:TableAttention",
        "torch": "ridgeline.engine.attention.paged:PagedAttention",
        "reference": "ridgeline.engine.attention.reference:ReferenceAttention",
    }
)
AUTO = ("native", "triton", "tables", "torch")
ON_REQUEST = MappingProxyType(
    {
        "flashinfer": "it never ran on a GPU here, and no figure says where it beats triton",
        "flex": "it copies keys out of the cache, and never ran on a GPU here",
    }
)
"""Backends that run only if they are asked for, and why."""


def attention_backend_of(name: str) -> AttentionBackend:
    """The class behind `name`. Raises BadInput with the known names."""
    if name not in BACKENDS:
        raise BadInput(
            "unknown attention backend", value=name, limit=", ".join(("auto", *BACKENDS))
        )
    module, _, cls = BACKENDS[name].partition(":")
    backend: AttentionBackend = getattr(import_module(module), cls)
    return backend


def choose(requested: str, site: AttentionSite) -> tuple[str, tuple[str, ...]]:
    """The backend to use and the reasons.

    Raises CannotRun if the one requested by name cannot run.
    """
    if requested != "auto":
        why_not = attention_backend_of(requested).why_not(site)
        if why_not:
            raise CannotRun(
                f"attention backend {requested!r} cannot run here: {'; '.join(why_not)}",
                value=requested,
                fix="use --attention-backend auto",
            )
        return requested, ("as requested",)
    rejected: list[str] = []
    for name in AUTO:
        why_not = attention_backend_of(name).why_not(site)
        if not why_not:
            chosen = f"{name}: the fastest that runs on {site.device.type}"
            return name, (*rejected, *_passed_over(site), chosen)
        rejected.append(f"not {name}: {'; '.join(why_not)}")
    if reasons := import_module("ridgeline.engine.attention.paged").why_not_latent(site):
        raise CannotRun(
            f"a KV cache in {site.kv_dtype} cannot hold latent attention: {'; '.join(reasons)}",
            value=site.kv_dtype,
            fix="use --kv-cache-dtype bfloat16",
        )
    raise CannotRun(f"no attention backend runs here: {' | '.join(rejected)}")


def _passed_over(site: AttentionSite) -> list[str]:
    """Why the backends that run on request alone were not considered."""
    found = []
    for name, reason in ON_REQUEST.items():
        why_not = attention_backend_of(name).why_not(site)
        found.append(f"not {name}: {'; '.join(why_not) or f'{reason}, so only if asked for'}")
    return found


def build_attention(name: str, spec: ModelSpec, cache: KvCache) -> Attention:
    """Build the backend `name` on `cache`, with states for the recurrent layers of `spec`."""
    if cache.recent:
        return _int4_attention(name)(spec, cache)
    backend = attention_backend_of(name)
    if cache.layout.windowed and not getattr(backend, "has_groups", False):
        from ridgeline.engine.attention.groups import GroupedAttention

        attention: Attention = GroupedAttention(backend, spec, cache)
    else:
        attention = backend(spec, cache)
    if not has_states(spec):
        return attention
    from ridgeline.engine.attention.states import StateCache, StatefulAttention

    device = cache.layers[0].device
    return StatefulAttention(attention, StateCache(spec, cache.num_states, device))


def _int4_attention(name: str) -> Callable[[ModelSpec, KvCache], Attention]:
    if name == "native":
        from ridgeline.engine.attention.int4.native import NativeInt4Attention

        return NativeInt4Attention
    from ridgeline.engine.attention.int4.attention import Int4Attention

    return Int4Attention
