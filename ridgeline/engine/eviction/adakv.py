"""Ada-KV: heads that look at many tokens keep more than heads that look at few.

What. Scores are those of SnapKV. The budget of a layer is that of all its heads together: the best
scores of any head win, except that each head is sure of a fifth of the uniform budget. A head keeps
whole tiles (a tile is a block's part of one head), so that the tiles of the layer's blocks are
divided among its heads, and the sequence holds exactly as many blocks as with SnapKV.

    block      head 0     head 1              table of head 0   0a 0b 1a
      0      [ 0a | 0b ]                      table of head 1   1b 1c …
      1      [ 1a | 1b ]

Tokens of the output are stored as usual, behind the tiles.

Paper. Ada-KV (Feng et al. 2024, arXiv 2407.11550), on SnapKV's scores.

When it loses. As SnapKV; and no kernel reads tables of single heads, so that attention of these
sequences gathers its tiles in torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.dense import KeySpan, attend_prefill, causal_mask
from ridgeline.engine.eviction.base import best, pick
from ridgeline.engine.eviction.snapkv import SnapKv
from ridgeline.engine.scheduler.kv.eviction import KvCompaction
from ridgeline.engine.scheduler.plan import Run
from ridgeline.modelspec.model import ModelSpec

SAFEGUARD = 0.2
"""Share of the uniform budget that each head is sure of."""


class AdaKv(SnapKv):
    """Keeps different numbers of tokens in the heads of a layer."""

    def __init__(self, spec: ModelSpec, cache: KvCache) -> None:
        super().__init__(spec, cache)
        self._tiles: dict[int, list[list[int]]] = {}  # of each head, by slot and layer

    def attends(self, run: Run) -> bool:
        return run.num_dropped > 0

    def attend(self, run: Run, q_THD: Tensor, layer: int) -> Tensor:
        attention, size = self.attentions[layer], self.rows.block_size
        counts = self._tiles[run.state_slot][layer]
        num_heads = attention.num_kv_heads
        num_region, first = sum(counts) // num_heads, 0
        num_behind = run.num_cached - num_region * size + len(run.tokens)
        blocks, out = run.blocks, []
        q_TKGD = q_THD.view(len(q_THD), num_heads, -1, attention.head_dim)
        for head, count in enumerate(counts):
            tiles = [(blocks[i // num_heads], i % num_heads) for i in range(first, first + count)]
            tiles += [(block, head) for block in blocks[num_region:]]
            first += count
            length = count * size + num_behind
            k_LD, v_LD = self._gather(layer, tiles, q_THD.dtype)[:, :length]
            start = length - len(q_THD)
            mask_TL = causal_mask(start, len(q_THD), 0, length, KeySpan.of(attention), k_LD)
            q_1GTD = q_TKGD[:, head].transpose(0, 1)[None]
            o_1GTD = attend_prefill(
                q_1GTD, k_LD[None], v_LD[None], mask_TL, attention.scale, attention.softcap
            )
            out.append(o_1GTD[0].transpose(0, 1))
        return torch.cat(out, 1)

    def _gather(self, layer: int, tiles: list[tuple[int, int]], dtype: torch.dtype) -> Tensor:
        """kv_2LD of one head's tiles, given as (block, head)."""
        cache = self.rows.cache
        kv_N2KBW = cache.layers[layer]
        block_S, head_S = torch.tensor(tiles, device=kv_N2KBW.device).unbind(1)
        tiles_S21BW = kv_N2KBW[block_S, :, head_S].unsqueeze(2)
        rows_S21BW = cache.format.from_tiles(tiles_S21BW)
        rows_2LW = rows_S21BW[:, :, 0].transpose(0, 1).flatten(1, 2)
        return cache.format.decode(rows_2LW, dtype)

    def compact(self, compaction: KvCompaction) -> None:
        size = self.rows.block_size
        num_region, num_behind = divmod(compaction.num_kept, size)
        end = compaction.num_cached - num_behind  # what is behind it lies in the last block
        self._tiles[compaction.state_slot] = counts = []
        for layer in range(len(self.attentions)):
            scores_KL = self.scores(compaction, layer)[:, :end]
            num_heads, num_before = scores_KL.shape
            own = divide_tiles(scores_KL, num_region, size, end - num_before)
            counts.append(own)
            rows_2KLW = self.rows.read(layer, compaction.sources, compaction.num_cached)
            last = torch.arange(num_before, end, device=scores_KL.device)
            kept = []
            for head, count in enumerate(own):
                chosen_1M = best(scores_KL[head : head + 1], count * size - len(last))
                index_1M = torch.cat((chosen_1M, last[None]), 1)
                kept.append(pick(rows_2KLW[:, head : head + 1], index_1M)[:, 0])
            tiles_2SBW = torch.cat(kept, 1).unflatten(1, (-1, size))
            region_2KLW = (
                tiles_2SBW.unflatten(1, (num_region, num_heads)).transpose(1, 2).flatten(2, 3)
            )
            behind_2KLW = rows_2KLW[:, :, end:]
            self.rows.write(layer, compaction.targets, torch.cat((region_2KLW, behind_2KLW), 2))
        self.forget(compaction)


def divide_tiles(scores_KL: Tensor, num_region: int, size: int, num_last: int) -> list[int]:
    """Tiles of `size` tokens for each head, `num_region` on average.

    Each head has room for its `num_last` latest tokens, and no more tiles than tokens.
    """
    num_heads, num_before = scores_KL.shape
    uniform = num_region * size - num_last
    top = scores_KL.flatten().argsort(descending=True, stable=True)[: num_heads * uniform]
    wins = torch.bincount(top // num_before, minlength=num_heads).tolist()
    budgets = [(1 - SAFEGUARD) * own + SAFEGUARD * uniform + num_last for own in wins]
    least, most = max(1, -(-num_last // size)), (num_before + num_last) // size
    counts = [min(max(int(budget // size), least), most) for budget in budgets]
    while (total := sum(counts)) != num_heads * num_region:
        step = 1 if total < num_heads * num_region else -1
        open_heads = [h for h in range(num_heads) if least <= counts[h] + step <= most]
        head = max(open_heads, key=lambda h: (step * (budgets[h] / size - counts[h]), -h))
        counts[head] += step
    return counts
