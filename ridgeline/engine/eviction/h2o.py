"""H2O: keys that have received the most attention so far (heavy hitters), and the latest ones.

What. Every query of a sequence adds its attention weights to the scores of the keys that it sees,
averaged over the query heads that share a key. When the budget is reached, each head of each layer
keeps the latest half of the budget, and of the others those with the largest sums.

Paper. H2O (Zhang et al., NeurIPS 2023, arXiv 2306.14048).

When it loses. Scores need the attention weights of every query, which fused kernels do not return:
each step computes them again, and a prompt finds no prefix hits. Sums favour early keys, which more
queries have seen. What no query has needed yet is lost before it is needed. Memory: the whole
prompt is in the cache until it is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.eviction.base import StoredRows, best, pick
from ridgeline.engine.eviction.snapkv import causal_weights
from ridgeline.engine.scheduler.kv.eviction import KvCompaction
from ridgeline.engine.scheduler.plan import Run
from ridgeline.modelspec.model import ModelSpec

QUERIES_AT_ONCE = 64
"""Rows whose attention weights are in memory at a time."""


class HeavyHitters:
    """Keeps the same number of tokens in every head."""

    def __init__(self, spec: ModelSpec, cache: KvCache) -> None:
        self.attentions = tuple(layer.attention for layer in spec.layers)
        self.rows = StoredRows(cache)
        self._sums: dict[int, list[Tensor]] = {}  # sums_KL, float64, by slot and layer

    def observes(self, run: Run) -> bool:
        return True

    def observe(self, run: Run, q_THD: Tensor, layer: int) -> None:
        attention = self.attentions[layer]
        num_heads = attention.num_kv_heads
        if run.num_cached == 0 and layer == 0:
            empty = torch.zeros((num_heads, 0), dtype=torch.float64, device=q_THD.device)
            self._sums[run.state_slot] = [empty] * len(self.attentions)
        length = run.num_cached + len(run.tokens)
        before_KL = self._sums[run.state_slot][layer][:, : run.num_cached]
        sums_KL = torch.nn.functional.pad(before_KL, (0, length - before_KL.shape[1]))
        k_KLD = self.rows.keys(layer, run.blocks, length)
        for at in range(0, len(q_THD), QUERIES_AT_ONCE):
            q_XHD = q_THD[at : at + QUERIES_AT_ONCE].double()
            end = run.num_cached + at + len(q_XHD)
            q_KYD = q_XHD.transpose(0, 1).reshape(num_heads, -1, attention.head_dim)
            scores_KYL = (q_KYD @ k_KLD[:, :end].mT) * attention.scale
            weights_HXL = causal_weights(scores_KYL.view(attention.num_heads, len(q_XHD), end))
            sums_KL[:, :end] += weights_HXL.sum(1).view(num_heads, -1, end).mean(1)
        self._sums[run.state_slot][layer] = sums_KL

    def attends(self, run: Run) -> bool:
        return False

    def attend(self, run: Run, q_THD: Tensor, layer: int) -> Tensor:
        raise AssertionError("every head has the same tokens")

    def compact(self, compaction: KvCompaction) -> None:
        num_cached, num_kept = compaction.num_cached, compaction.num_kept
        num_latest = min(num_kept, compaction.eviction.budget // 2)
        sums = self._sums[compaction.state_slot]
        for layer, sums_KL in enumerate(sums):
            chosen_KM = best(sums_KL[:, : num_cached - num_latest], num_kept - num_latest)
            ends = torch.arange(num_cached - num_latest, num_cached, device=sums_KL.device)
            index_KM = torch.cat((chosen_KM, ends.expand(len(chosen_KM), -1)), 1)
            rows_2KLW = self.rows.read(layer, compaction.sources, num_cached)
            self.rows.write(layer, compaction.targets, pick(rows_2KLW, index_KM))
            sums[layer] = sums_KL.gather(1, index_KM)
