"""The runner's part of KV eviction by scores: observe queries, then keep the best tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from types import MappingProxyType

import torch
from torch import Tensor

from ridgeline.engine.attention.base import Attend
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.eviction.base import TokenSelector
from ridgeline.engine.scheduler.kv.eviction import KvCompaction
from ridgeline.engine.scheduler.plan import Run
from ridgeline.modelspec.model import ModelSpec

SELECTORS = MappingProxyType(
    {
        "snapkv": "ridgeline.engine.eviction.snapkv:SnapKv",
        "adakv": "ridgeline.engine.eviction.adakv:AdaKv",
        "h2o": "ridgeline.engine.eviction.h2o:HeavyHitters",
    }
)


class KvEvictor:
    """The selectors of one cache, each built when a sequence first needs it."""

    def __init__(self, spec: ModelSpec, cache: KvCache) -> None:
        self._spec, self._cache = spec, cache
        self._selectors: dict[str, TokenSelector] = {}

    def takes_part(self, runs: Sequence[Run]) -> bool:
        """Whether a step needs `wrap`."""
        return any(self._takes_part(run) for run in runs if run.eviction is not None)

    def _takes_part(self, run: Run) -> bool:
        assert run.eviction is not None
        if run.eviction.is_sliding:
            return False
        selector = self._selector(run.eviction.method)
        return selector.observes(run) or selector.attends(run)

    def wrap(self, runs: Sequence[Run], attend: Attend) -> Attend:
        """The attention of a step, whose queries the selectors observe; the same if none does."""
        if not self.takes_part(runs):
            return attend
        placed, row = [], 0
        for run in runs:
            if run.eviction is not None and not run.eviction.is_sliding:
                placed.append((row, run, self._selector(run.eviction.method)))
            row += len(run.tokens)
        return ObservedStep(attend, placed)

    @torch.inference_mode()
    def compact(self, compactions: Sequence[KvCompaction]) -> None:
        """Evict what a plan evicts."""
        for compaction in compactions:
            self._selector(compaction.eviction.method).compact(compaction)

    def _selector(self, method: str) -> TokenSelector:
        if method not in self._selectors:
            module, _, name = SELECTORS[method].partition(":")
            make: Callable[[ModelSpec, KvCache], TokenSelector]
            make = getattr(import_module(module), name)
            self._selectors[method] = make(self._spec, self._cache)
        return self._selectors[method]


class ObservedStep:
    """The `Attend` of a step in which `placed` runs, given with their first rows, evict tokens."""

    def __init__(self, inner: Attend, placed: Sequence[tuple[int, Run, TokenSelector]]) -> None:
        self.inner, self.placed = inner, placed

    def __call__(
        self, q_THD: Tensor, kv_T2KD: Tensor, layer: int, sinks_H: Tensor | None = None
    ) -> Tensor:
        out_THD = self.inner(q_THD, kv_T2KD, layer, sinks_H)
        for first, run, selector in self.placed:
            own = slice(first, first + len(run.tokens))
            if selector.observes(run):
                selector.observe(run, q_THD[own], layer)
            if selector.attends(run):
                out_THD[own] = selector.attend(run, q_THD[own], layer).to(out_THD.dtype)
        return out_THD
