"""Reference attention: one query position and one head at a time, in float64, by definition.

No batching, no masks, no gathers beyond indexing one position. All other backends are compared with
it; it is far too slow for anything else.

Shape legend: T new tokens, H query heads, K key/value heads, D head_dim, L visible positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.engine.attention.base import AttentionSite
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.dense import KeySpan
from ridgeline.engine.attention.latent import LatentUp
from ridgeline.engine.scheduler.plan import Run, stored_runs
from ridgeline.modelspec.model import AttentionSpec, ModelSpec


class ReferenceAttention:
    """Runs on every device, in any dtype."""

    def __init__(self, spec: ModelSpec, cache: KvCache) -> None:
        self.spec, self.cache = spec, cache

    @staticmethod
    def why_not(site: AttentionSite) -> tuple[str, ...]:
        return ()

    def prepare(self, runs: Sequence[Run]) -> _ReferenceStep:
        return _ReferenceStep(
            self.spec, self.cache, tuple(stored_runs(runs, self.cache.block_size))
        )


class _ReferenceStep:
    def __init__(self, spec: ModelSpec, cache: KvCache, runs: tuple[Run, ...]) -> None:
        self.spec, self.cache, self.runs = spec, cache, runs

    def __call__(
        self, q_THD: Tensor, kv_T2KD: Tensor, layer: int, sinks_H: Tensor | None = None
    ) -> Tensor:
        attention, kv_N2KBW = self.spec.layers[layer].attention, self.cache.layers[layer]
        stored_T2KW = self.cache.format.encode(kv_T2KD)
        rows = [(run, run.start + offset) for run in self.runs for offset in range(len(run.tokens))]
        for row, (run, position) in enumerate(rows):
            block, offset = self._place(run, position)
            rows_2KBW = self.cache.format.from_tiles(kv_N2KBW[block]).clone()
            rows_2KBW[:, :, offset] = stored_T2KW[row]
            kv_N2KBW[block] = self.cache.format.to_tiles(rows_2KBW)
        out_THD = torch.empty_like(q_THD)
        for row, (run, position) in enumerate(rows):
            first = KeySpan.of(attention).first_seen(position)
            places = [self._place(run, seen) for seen in range(first, position + 1)]
            rows_N2KBW = {
                block: self.cache.format.from_tiles(kv_N2KBW[block]) for block, _ in places
            }
            kv_L2KW = torch.stack([rows_N2KBW[block][:, :, offset] for block, offset in places])
            kv_L2KD = self.cache.format.decode(kv_L2KW, torch.float32)
            out_THD[row] = attend_one(q_THD[row], kv_L2KD, attention, sinks_H)
        return out_THD

    def attend_latent(self, q_THD: Tensor, rows_TW: Tensor, layer: int, up: LatentUp) -> Tensor:
        """o_THV by definition: every key and value of every head is computed, in float64."""
        attention, kv_N11BW = self.spec.layers[layer].attention, self.cache.layers[layer]
        rows = [(run, run.start + offset) for run in self.runs for offset in range(len(run.tokens))]
        for row, (run, position) in enumerate(rows):
            block, offset = self._place(run, position)
            kv_N11BW[block, 0, 0, offset] = self.cache.format.encode(rows_TW[row])
        out_THV = q_THD.new_empty((*q_THD.shape[:2], up.value_HVR.shape[1]))
        for row, (run, position) in enumerate(rows):
            places = [self._place(run, seen) for seen in range(position + 1)]
            stored_LW = torch.stack([kv_N11BW[block, 0, 0, offset] for block, offset in places])
            rows_LW = self.cache.format.decode(stored_LW, torch.float32).double()
            latent_LR, rotated_LX = rows_LW[:, : up.rank], rows_LW[:, up.rank :]
            for head in range(attention.num_heads):
                k_LD = torch.cat((latent_LR @ up.key_HPR[head].double().T, rotated_LX), -1)
                v_LV = latent_LR @ up.value_HVR[head].double().T
                scores_L = (k_LD @ q_THD[row, head].double()) * attention.scale
                out_THV[row, head] = torch.softmax(scores_L, dim=0) @ v_LV
        return out_THV

    def _place(self, run: Run, position: int) -> tuple[int, int]:
        size = self.cache.block_size
        return run.blocks[position // size], position % size


def attend_one(
    q_HD: Tensor, kv_L2KD: Tensor, attention: AttentionSpec, sinks_H: Tensor | None = None
) -> Tensor:
    """o_HD of one query over the L positions it sees, head by head, in float64."""
    out = []
    for head in range(attention.num_heads):
        kv_head = head // (attention.num_heads // attention.num_kv_heads)
        k_LD, v_LD = kv_L2KD[:, 0, kv_head].double(), kv_L2KD[:, 1, kv_head].double()
        scores_L = (k_LD @ q_HD[head].double()) * attention.scale
        if attention.softcap is not None:
            scores_L = attention.softcap * torch.tanh(scores_L / attention.softcap)
        if sinks_H is not None:  # one more score, whose value is zero
            scores_L = torch.cat((scores_L, sinks_H[head : head + 1].double()))
        out.append(torch.softmax(scores_L, dim=0)[: len(v_LD)] @ v_LD)
    return torch.stack(out).to(q_HD.dtype)
