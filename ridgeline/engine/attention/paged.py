"""Paged attention in plain torch: gather each sequence's blocks, then attend, without padding.

What. Runs of several tokens (prefill, chunks) are attended one sequence at a time. Runs of one
token (decode) are grouped by the number of blocks they see, so that a handful of calls serves all
of them. Within a group contexts differ by at most an eighth, and shorter ones are padded with their
own last block, masked. So a sequence costs what *it* reads (at most 9/8 of it), not what the
longest sequence of the batch reads, and no mask spans the batch. Sliding windows gather only the
blocks within the window.

Paper. PagedAttention (Kwon et al., SOSP 2023, arXiv 2309.06180); the query folding is that of
FlashDecoding-style GQA kernels.

Invariants. Those of the family. Indices and masks depend on the window and the number of key heads
only: they are built once per step for each such pair and shared by the layers that have it.

When it loses. Gathering the blocks copies keys and values before reading them (three times the
traffic of a kernel that walks the block table), and each torch call costs microseconds. A native
kernel avoids both; this backend runs everywhere.

Shape legend: T new tokens, S sequences of a group, H query heads, K key heads, G = H/K, N blocks of
the pool, B block_size, L gathered positions, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.engine.attention.base import AttentionSite
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.dense import (
    KeySpan,
    attend_decode,
    attend_prefill,
    needs_scores,
)
from ridgeline.engine.attention.indices import (
    NO_INDICES,
    DecodeGroup,
    IndexBuilder,
    PrefillRun,
    StepIndices,
)
from ridgeline.engine.attention.kv_format import read_tiles
from ridgeline.engine.attention.latent import LatentUp, attend_pieces
from ridgeline.engine.scheduler.plan import Run, stored_runs
from ridgeline.modelspec.format import KV_GROUP, KV_SCALE_BYTES
from ridgeline.modelspec.model import AttentionSpec, ModelSpec


@dataclass(frozen=True)
class IndexKind:
    """What the indices of a layer depend on. `explicit_scores` need explicit masks."""

    span: KeySpan
    num_kv_heads: int
    explicit_scores: bool
    num_sides: int

    @staticmethod
    def of(attention: AttentionSpec) -> IndexKind:
        num_sides = 2 if attention.latent is None else 1
        return IndexKind(
            KeySpan.of(attention), attention.num_kv_heads, needs_scores(attention), num_sides
        )


class PagedAttention:
    """Runs on every device and float dtype."""

    def __init__(self, spec: ModelSpec, cache: KvCache) -> None:
        self.attentions = tuple(layer.attention for layer in spec.layers)
        self.cache = cache
        like = torch.empty(0, dtype=cache.dtype, device=cache.layers[0].device)
        in_pieces = like.device.type == "cpu" and cache.dtype == torch.float32
        self.decode_latent = _decode_latent_in_pieces if in_pieces else _decode_latent
        self.kinds = tuple(IndexKind.of(attention) for attention in self.attentions)
        self.builders = {
            kind: IndexBuilder(
                cache.block_size,
                kind.num_kv_heads,
                kind.span,
                kind.explicit_scores,
                like,
                kind.num_sides,
            )
            for kind in self.kinds
            if kind.num_kv_heads
        }

    @staticmethod
    def why_not(site: AttentionSite) -> tuple[str, ...]:
        if site.kv_dtype == "int4" and (site.device.type, site.block_size) != ("cpu", KV_GROUP):
            return (f"a KV cache in INT4 runs on the CPU in blocks of {KV_GROUP} tokens only",)
        return why_not_latent(site)

    def prepare(self, runs: Sequence[Run]) -> PagedStep:
        runs = stored_runs(runs, self.cache.block_size)
        indices = {kind: builder.build(runs) for kind, builder in self.builders.items()}
        return PagedStep(self, tuple(indices.get(kind, NO_INDICES) for kind in self.kinds))


class PagedStep:
    """One step of `PagedAttention`; layers of one kind share their indices."""

    def __init__(self, owner: PagedAttention, indices: tuple[StepIndices, ...]) -> None:
        self.attentions, self.cache, self.indices = owner.attentions, owner.cache, indices
        self.decode_latent = owner.decode_latent

    def __call__(
        self, q_THD: Tensor, kv_T2KD: Tensor, layer: int, sinks_H: Tensor | None = None
    ) -> Tensor:
        attention, indices = self.attentions[layer], self.indices[layer]
        kv = LayerCache(self.cache, layer)
        kv.write(indices.slots_R, kv_T2KD.reshape(-1, attention.head_dim))
        if indices.whole is not None:
            return _decode(q_THD, kv, indices.whole, attention, sinks_H)
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        for group in indices.groups:
            o_SHD = _decode(q_THD.index_select(0, group.rows_S), kv, group, attention, sinks_H)
            out_THD.index_copy_(0, group.rows_S, o_SHD)
        for prefill in indices.prefills:
            _prefill(q_THD, kv, prefill, attention, sinks_H, out_THD)
        return out_THD

    def attend_latent(self, q_THD: Tensor, rows_TW: Tensor, layer: int, up: LatentUp) -> Tensor:
        """o_THV over latent rows; each run in the form that needs less arithmetic."""
        attention, indices = self.attentions[layer], self.indices[layer]
        kv = LayerCache(self.cache, layer)
        kv.write(indices.slots_R, rows_TW)
        out_THV = q_THD.new_empty((*q_THD.shape[:2], up.value_HVR.shape[1]))
        for group in indices.groups:
            q_SHD = q_THD.index_select(0, group.rows_S)
            o_SHV = self.decode_latent(q_SHD, kv, group, attention, up)
            out_THV.index_copy_(0, group.rows_S, o_SHV)
        for prefill in indices.prefills:
            _prefill_latent(q_THD, kv, prefill, attention, up, out_THV)
        return out_THV


class LayerCache:
    """One layer of the cache: writes rows and gathers tiles, both in the compute dtype."""

    def __init__(self, cache: KvCache, layer: int) -> None:
        self.kv_N2KBW, self.format, self.dtype = cache.layers[layer], cache.format, cache.dtype

    def write(self, slots_R: Tensor, rows_RD: Tensor) -> None:
        """Store rows at slots, each a flattened (block, key|value, head, position)."""
        self.format.write(self.kv_N2KBW, slots_R, self.format.encode(rows_RD))

    def gather(self, tiles: Tensor, num_seqs: int) -> Tensor:
        """kv_2SKLD of the given tiles, each a flattened (block, key|value, head), in one copy."""
        _, num_sides, num_heads, block_size, width = self.kv_N2KBW.shape
        tiles_RBW = read_tiles(self.kv_N2KBW, tiles)
        rows_2YBW = self.format.from_tiles(tiles_RBW.view(num_sides, -1, block_size, width))
        return self.format.decode(
            rows_2YBW.view(num_sides, num_seqs, num_heads, -1, width), self.dtype
        )


def _decode(
    q_SHD: Tensor,
    kv: LayerCache,
    group: DecodeGroup,
    attention: AttentionSpec,
    sinks_H: Tensor | None,
) -> Tensor:
    num_seqs = q_SHD.shape[0]
    kv_2SKLD = kv.gather(group.tiles, num_seqs)[:, :, :, group.first : group.end]
    q_SKGD = q_SHD.reshape(num_seqs, attention.num_kv_heads, -1, attention.head_dim)
    o_SKGD = attend_decode(
        q_SKGD,
        kv_2SKLD[0],
        kv_2SKLD[1],
        group.mask_S11L,
        attention.scale,
        attention.softcap,
        sinks_H,
    )
    return o_SKGD.reshape(num_seqs, attention.num_heads, attention.head_dim)


def _prefill(
    q_THD: Tensor,
    kv: LayerCache,
    prefill: PrefillRun,
    attention: AttentionSpec,
    sinks_H: Tensor | None,
    out_THD: Tensor,
) -> None:
    k_KLD, v_KLD = kv.gather(prefill.tiles, 1)[:, 0]
    num_kv_heads, num_groups = attention.num_kv_heads, attention.num_heads // attention.num_kv_heads
    for span in prefill.spans:
        q_TKGD = q_THD[span.rows].view(-1, num_kv_heads, num_groups, attention.head_dim)
        o_KGTD = attend_prefill(
            q_TKGD.permute(1, 2, 0, 3),
            k_KLD[:, span.keys],
            v_KLD[:, span.keys],
            span.mask_TL,
            attention.scale,
            attention.softcap,
            sinks_H,
        )
        out_THD[span.rows] = o_KGTD.permute(2, 0, 1, 3).flatten(1, 2)


def _decode_latent(
    q_SHD: Tensor, kv: LayerCache, group: DecodeGroup, attention: AttentionSpec, up: LatentUp
) -> Tensor:
    rows_S1LW = kv.gather(group.tiles, len(q_SHD))[0, :, :, group.first : group.end]
    q_S1HW, latent_S1LR = up.absorb(q_SHD).unsqueeze(1), rows_S1LW[..., : up.rank]
    o_S1HR = attend_decode(
        q_S1HW, rows_S1LW, latent_S1LR, group.mask_S11L, attention.scale, attention.softcap
    )
    return up.values_of(o_S1HR.squeeze(1))


PIECE_TOKENS, PIECE_SEQS = 256, 8
"""Of the rows that are gathered at once: they stay in the CPU's cache between the two products."""


def _decode_latent_in_pieces(
    q_SHD: Tensor, kv: LayerCache, group: DecodeGroup, attention: AttentionSpec, up: LatentUp
) -> Tensor:
    """The same in float32 on a CPU, where a copy of all rows costs more than the attention."""
    tiles_SN = group.tiles.view(len(q_SHD), -1)
    block_size = kv.kv_N2KBW.shape[-2]
    each = max(1, PIECE_TOKENS // block_size)
    q_SHW = up.absorb(q_SHD) * attention.scale

    def pieces(seqs: slice) -> Iterator[tuple[Tensor, Tensor | None]]:
        for block in range(0, tiles_SN.shape[1], each):
            tiles = tiles_SN[seqs, block : block + each]
            rows_SLW = kv.gather(tiles.reshape(-1), len(tiles))[0, :, 0]
            start = block * block_size  # positions first..end of those gathered count
            seen = slice(max(group.first - start, 0), max(group.end - start, 0))
            if rows_SLW[:, seen].shape[1] == 0:
                continue
            mask_S1L = None
            if group.mask_S11L is not None:
                keys = slice(max(start - group.first, 0), start + rows_SLW.shape[1] - group.first)
                mask_S1L = group.mask_S11L[seqs, 0, :, keys]
            yield rows_SLW[:, seen], mask_S1L

    parts = [slice(at, at + PIECE_SEQS) for at in range(0, len(q_SHD), PIECE_SEQS)]
    return up.values_of(torch.cat([attend_pieces(q_SHW[s], pieces(s), up.rank) for s in parts]))


def _prefill_latent(
    q_THD: Tensor,
    kv: LayerCache,
    prefill: PrefillRun,
    attention: AttentionSpec,
    up: LatentUp,
    out_THV: Tensor,
) -> None:
    rows_LW = kv.gather(prefill.tiles, 1)[0, 0, 0]
    absorbs = up.absorbs(sum(span.rows.stop - span.rows.start for span in prefill.spans))
    k_KLX, v_KLX = (rows_LW[None], rows_LW[None, :, : up.rank]) if absorbs else up.expand(rows_LW)
    for span in prefill.spans:
        q_THX = up.absorb(q_THD[span.rows]) if absorbs else q_THD[span.rows]
        q_TKGX = q_THX.view(len(q_THX), len(k_KLX), -1, q_THX.shape[-1])
        o_KGTX = attend_prefill(
            q_TKGX.permute(1, 2, 0, 3),
            k_KLX[:, span.keys],
            v_KLX[:, span.keys],
            span.mask_TL,
            attention.scale,
            attention.softcap,
        )
        o_THX = o_KGTX.permute(2, 0, 1, 3).flatten(1, 2)
        out_THV[span.rows] = up.values_of(o_THX) if absorbs else o_THX


def why_not_latent(site: AttentionSite) -> tuple[str, ...]:
    """Why a latent cache cannot be stored at `site`; empty where it can, or there is none."""
    if not site.has_latent or site.kv_dtype not in KV_SCALE_BYTES:
        return ()
    return (
        f"{site.kv_dtype} has one scale per key and value of a head, and a latent row is neither",
    )
