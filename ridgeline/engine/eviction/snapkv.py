"""SnapKV: what the last tokens of a prompt attend to is what the answer will need.

What. When a prompt has been computed, the queries of its last `window` tokens (the observation
window) are compared with all keys. The attention that a key gets from them, summed over the window,
averaged over the query heads that share it and over `pooling` neighbouring keys, is its score. Each
head of each layer keeps the best keys, and the window itself, `budget` in all. All tokens of the
output are kept.

Paper. SnapKV (Li et al., NeurIPS 2024, arXiv 2404.14469). The average within groups of query heads
and the pooling by average are those of NVIDIA's kvpress.

When it loses. The window is the question: a second question about the same prompt finds what the
first one chose. A prompt that ends in something else than its question keeps the wrong tokens.
Memory: the whole prompt is in the cache until it is computed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.eviction.base import StoredRows, best, pick
from ridgeline.engine.scheduler.kv.eviction import KvCompaction
from ridgeline.engine.scheduler.plan import Run
from ridgeline.modelspec.model import ModelSpec


class SnapKv:
    """Keeps the same number of tokens in every head."""

    def __init__(self, spec: ModelSpec, cache: KvCache) -> None:
        self.attentions = tuple(layer.attention for layer in spec.layers)
        self.rows = StoredRows(cache)
        self._queries: dict[int, list[Tensor]] = {}  # q_THD of the window, by slot and layer

    def observes(self, run: Run) -> bool:
        eviction = run.eviction
        if eviction is None or eviction.next_drop(run.start) > eviction.num_prompt:
            return False
        return run.start + len(run.tokens) > eviction.num_prompt - eviction.window

    def observe(self, run: Run, q_THD: Tensor, layer: int) -> None:
        eviction = run.eviction
        assert eviction is not None
        first = eviction.num_prompt - eviction.window
        if layer == 0 and run.start <= first:
            self._queries[run.state_slot] = [
                torch.zeros((eviction.window, a.num_heads, a.head_dim), device=q_THD.device)
                for a in self.attentions
            ]
        skipped = max(0, first - run.start)
        at = run.start + skipped - first
        own_THD = q_THD[skipped:]
        self._queries[run.state_slot][layer][at : at + len(own_THD)] = own_THD

    def attends(self, run: Run) -> bool:
        return False

    def attend(self, run: Run, q_THD: Tensor, layer: int) -> Tensor:
        raise AssertionError("every head has the same tokens")

    def compact(self, compaction: KvCompaction) -> None:
        window, num_kept = compaction.eviction.window, compaction.num_kept
        for layer in range(len(self.attentions)):
            scores_KL = self.scores(compaction, layer)
            chosen_KM = best(scores_KL, num_kept - window)
            ends = torch.arange(scores_KL.shape[1], compaction.num_cached, device=chosen_KM.device)
            index_KM = torch.cat((chosen_KM, ends.expand(len(chosen_KM), -1)), 1)
            rows_2KLW = self.rows.read(layer, compaction.sources, compaction.num_cached)
            self.rows.write(layer, compaction.targets, pick(rows_2KLW, index_KM))
        self.forget(compaction)

    def forget(self, compaction: KvCompaction) -> None:
        """The prompt's queries have served their purpose."""
        del self._queries[compaction.state_slot]

    def scores(self, compaction: KvCompaction, layer: int) -> Tensor:
        """Float64 scores_KL of the tokens before the observation window."""
        attention, eviction = self.attentions[layer], compaction.eviction
        window, length = eviction.window, compaction.num_cached
        k_KLD = self.rows.keys(layer, compaction.sources, length)
        q_WHD = self._queries[compaction.state_slot][layer].double()
        q_KXD = q_WHD.transpose(0, 1).reshape(attention.num_kv_heads, -1, attention.head_dim)
        scores_KXL = (q_KXD @ k_KLD.mT) * attention.scale
        weights_HWL = causal_weights(scores_KXL.view(attention.num_heads, window, length))
        votes_KL = weights_HWL.sum(1).view(attention.num_kv_heads, -1, length).mean(1)
        before_KL = votes_KL[:, : length - window]
        pooling = eviction.pooling
        return F.avg_pool1d(before_KL, pooling, stride=1, padding=pooling // 2)


def causal_weights(scores_HTL: Tensor) -> Tensor:
    """Attention weights of the last T of L positions."""
    num_queries, length = scores_HTL.shape[1:]
    k_L = torch.arange(length, device=scores_HTL.device)
    q_T1 = torch.arange(length - num_queries, length, device=scores_HTL.device)[:, None]
    return scores_HTL.masked_fill(k_L > q_T1, float("-inf")).softmax(-1)
