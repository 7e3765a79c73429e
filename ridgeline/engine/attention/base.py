"""Attention over a paged KV cache: the contract of the backends.

A backend is built once from the spec and the cache. For each step it prepares the runs (`prepare`:
all indices and masks, made once and shared by the layers) and returns an `Attend`, which every
layer calls with its new queries, keys and values.

Invariants, checked by `tests/conformance`:

1. After `attend(q, kv, layer)`, the new keys and values are in the cache at their positions.
2. Row t of the result attends to the positions max(0, p-W+1)..p of *its own sequence* (p its
   position, W the layer's window) and to nothing else: the rest of the batch cannot change it
   beyond rounding.
3. Scores are q·k · scale, soft-capped as c·tanh(s/c) where the layer has a cap.
4. Query head h reads key head h // (num_heads / num_kv_heads).
5. Runs may come in any order, of any length, at any start, with blocks anywhere in the pool.
6. The result has the dtype of q, and the inputs are not modified.

Shape legend: T new tokens of the step, H query heads, K key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.scheduler.plan import Run
from ridgeline.modelspec.model import ModelSpec


class Attend(Protocol):
    """Attention of one step, called by every layer.

    `kv_T2KD` holds the new keys at [:, 0] and the new values at [:, 1]. `sinks_H` is a logit per
    query head that takes part in the softmax and has no value (None: the layer has none).
    """

    def __call__(
        self, q_THD: Tensor, kv_T2KD: Tensor, layer: int, sinks_H: Tensor | None = None
    ) -> Tensor:
        """o_THD, newly allocated or a view of a new tensor."""
        ...


class Attention(Protocol):
    """A backend. Between steps it keeps no state but the cache it writes."""

    def prepare(self, runs: Sequence[Run]) -> Attend:
        """Attention of a step with these runs, whose rows are in order."""
        ...


@dataclass(frozen=True)
class AttentionSite:
    """The device and shapes that a backend checks its requirements against."""

    device: torch.device
    dtype: torch.dtype
    block_size: int
    head_dims: tuple[int, ...]
    has_softcap: bool = False
    has_window: bool = False
    has_chunk: bool = False
    has_latent: bool = False
    kv_dtype: str = "float32"

    @staticmethod
    def of(
        spec: ModelSpec, device: torch.device, dtype: torch.dtype, block_size: int
    ) -> AttentionSite:
        """The requirements of a model on a device."""
        attentions = [layer.attention for layer in spec.layers]
        return AttentionSite(
            device=device,
            dtype=dtype,
            block_size=block_size,
            head_dims=tuple(sorted({a.head_dim for a in attentions})),
            has_softcap=any(a.softcap is not None for a in attentions),
            has_window=any(a.window is not None for a in attentions),
            has_chunk=any(a.chunk is not None for a in attentions),
            has_latent=any(a.latent is not None for a in attentions),
            kv_dtype=spec.kv_dtype,
        )


class AttentionBackend(Protocol):
    """A registered class: states why it cannot run, or is built into an `Attention`."""

    @staticmethod
    def why_not(site: AttentionSite) -> tuple[str, ...]:
        """Reasons why this backend cannot run at `site`; empty if it can."""
        ...

    def __call__(self, spec: ModelSpec, cache: KvCache) -> Attention: ...
