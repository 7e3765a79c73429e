"""Paged attention over block tables of fixed shapes: what CUDA graphs and GPU kernels need.

What. A step of decode rows is four integer tensors on the device: the slot that each row's key and
value are written to, the number of keys that it sees, and a table of its blocks, padded to a fixed
number of columns. Shapes depend on the numbers of rows and columns alone, so a step can be captured
once and replayed with other numbers. A row of a draft has a separate table: verifying drafts is
decoding more rows.

Runs of several tokens take other paths. A prompt that starts at position 0 attends to its own new
keys, without reading the cache back (`F.scaled_dot_product_attention`, which chooses
FlashAttention or cuDNN). Later chunks, and prompts that need masks or scores, go through
`PagedKernels.prefill`, or through the gather of `PagedAttention` where the kernels have none.

Paper. PagedAttention (Kwon et al., SOSP 2023, arXiv 2309.06180).

Invariants. Those of the family. Rows of padding read and write one reserved block only: the last of
the cache, which the block pool must not hand out if a caller pads.

When it loses. With `TorchKernels`, decode gathers whole tables, padding included. Those kernels are
the reference of this layout, and what runs on a GPU without Triton.

Shape legend: T rows of the step, S rows that decode, M columns of a table, H query heads, K key
heads, B block_size, L = M·B gathered positions, D head_dim, N blocks of the pool, W numbers of a
stored row.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import ClassVar, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.attention.base import Attend, AttentionSite
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.dense import KeySpan, attend_decode, needs_scores
from ridgeline.engine.attention.latent import LatentUp, attend_run
from ridgeline.engine.attention.paged import LayerCache, PagedAttention, why_not_latent
from ridgeline.engine.scheduler.plan import Run, stored_runs
from ridgeline.modelspec.model import AttentionSpec, ModelSpec

Tables = TypeVar("Tables")


class PackedInts:
    """Lists of integers that go to the device in one copy.

    `add` returns the place of a list, by which it is found in the tensor of `copy_to`.
    """

    def __init__(self) -> None:
        self._ints = array("i")

    def add(self, ints: Iterable[int]) -> slice:
        """Append a list."""
        first = len(self._ints)
        self._ints.extend(ints)
        return slice(first, len(self._ints))

    def copy_to(self, device: torch.device) -> Tensor:
        """All lists as one int32 tensor on the device; the host does not wait for the copy."""
        host = torch.frombuffer(self._ints, dtype=torch.int32)
        if device.type != "cuda":
            return host.to(device)
        return host.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class DecodeTables:
    """Rows that each see the keys before their own; int32 tensors on the device."""

    slots_S: Tensor
    lens_S: Tensor
    tables_SM: Tensor


@dataclass(frozen=True)
class ChunkTables:
    """Runs of several rows over a context: `starts_R1` are cumulative rows, `lens_R` their keys.

    `tables_RM` has a row per run; `max_queries` is the longest run's number of rows.
    """

    starts_R1: Tensor
    lens_R: Tensor
    tables_RM: Tensor
    max_queries: int


class PagedKernels(Protocol):
    """Kernels over one cache, called with a layer's index."""

    def store(self, kv_T2KD: Tensor, slots_T: Tensor, layer: int) -> None:
        """Write keys and values to slots, each block · B + offset."""
        ...

    def decode(
        self, q_SHD: Tensor, tables: DecodeTables, layer: int, sinks_H: Tensor | None
    ) -> Tensor:
        """o_SHD of rows whose keys are stored."""
        ...

    def prefill(
        self, q_THD: Tensor, tables: ChunkTables, layer: int, sinks_H: Tensor | None
    ) -> Tensor | None:
        """o_THD of runs whose keys are stored; None if there is no kernel for it."""
        ...

    def store_latent(self, rows_TW: Tensor, slots_T: Tensor, layer: int) -> None:
        """Write latent rows to slots."""
        ...

    def decode_latent(self, q_SHW: Tensor, tables: DecodeTables, layer: int, rank: int) -> Tensor:
        """o_SHR of absorbed queries over stored latent rows, whose first `rank` numbers are the
        values."""
        ...


class TorchKernels:
    """Gathers whole tables: runs on every device and in every format. The reference."""

    def __init__(self, spec: ModelSpec, cache: KvCache) -> None:
        self.attentions = tuple(layer.attention for layer in spec.layers)
        self.layers = tuple(LayerCache(cache, index) for index in range(len(cache.layers)))
        self.block_size, self.device = cache.block_size, cache.layers[0].device

    def store(self, kv_T2KD: Tensor, slots_T: Tensor, layer: int) -> None:
        num_heads, size = self.attentions[layer].num_kv_heads, self.block_size
        slots_T = slots_T.long()
        heads = torch.arange(2 * num_heads, device=self.device) * size
        first_T1 = (slots_T // size * (2 * num_heads * size) + slots_T % size).unsqueeze(1)
        slots_R = (first_T1 + heads).reshape(-1)
        self.layers[layer].write(slots_R, kv_T2KD.reshape(-1, kv_T2KD.shape[-1]))

    def decode(
        self, q_SHD: Tensor, tables: DecodeTables, layer: int, sinks_H: Tensor | None
    ) -> Tensor:
        attention = self.attentions[layer]
        num_rows, num_heads = len(q_SHD), attention.num_kv_heads
        sides = torch.arange(2 * num_heads, device=self.device).view(2, 1, num_heads, 1)
        blocks_1S1M = tables.tables_SM.view(1, num_rows, 1, -1)
        tiles = (blocks_1S1M * (2 * num_heads) + sides).reshape(-1)
        k_SKLD, v_SKLD = self.layers[layer].gather(tiles, num_rows)
        q_SKGD = q_SHD.reshape(num_rows, num_heads, -1, attention.head_dim)
        mask_S11L = self._mask(tables.lens_S, k_SKLD.shape[2], attention, q_SHD)
        scale, softcap = attention.scale, attention.softcap
        o_SKGD = attend_decode(q_SKGD, k_SKLD, v_SKLD, mask_S11L, scale, softcap, sinks_H)
        return o_SKGD.reshape(q_SHD.shape)

    def prefill(
        self, q_THD: Tensor, tables: ChunkTables, layer: int, sinks_H: Tensor | None
    ) -> Tensor | None:
        return None

    def store_latent(self, rows_TW: Tensor, slots_T: Tensor, layer: int) -> None:
        self.layers[layer].write(slots_T.long(), rows_TW)

    def decode_latent(self, q_SHW: Tensor, tables: DecodeTables, layer: int, rank: int) -> Tensor:
        attention = self.attentions[layer]
        rows_S1LW = self.layers[layer].gather(tables.tables_SM.reshape(-1), len(q_SHW))[0]
        mask_S11L = self._mask(tables.lens_S, rows_S1LW.shape[2], attention, q_SHW)
        q_S1HW, latent_S1LR = q_SHW.unsqueeze(1), rows_S1LW[..., :rank]
        scale, softcap = attention.scale, attention.softcap
        return attend_decode(q_S1HW, rows_S1LW, latent_S1LR, mask_S11L, scale, softcap).squeeze(1)

    def _mask(self, lens_S: Tensor, length: int, attention: AttentionSpec, like: Tensor) -> Tensor:
        position_S1 = (lens_S - 1).unsqueeze(1)
        k_L = torch.arange(length, device=self.device)
        hidden_SL = k_L > position_S1
        KeySpan.of(attention).hide(hidden_SL, position_S1, k_L)
        zeros = torch.zeros(hidden_SL.shape, dtype=like.dtype, device=self.device)
        return zeros.masked_fill_(hidden_SL, float("-inf"))[:, None, None]


class TableAttention:
    """Block tables with kernels of torch operators; subclasses bring faster ones.

    `why_not_captured`: why a decode step must not be captured in a CUDA graph; "" if it may.
    """

    why_not_captured: ClassVar[str] = ""

    def __init__(self, spec: ModelSpec, cache: KvCache) -> None:
        self.attentions = tuple(layer.attention for layer in spec.layers)
        self.cache, self.device = cache, cache.layers[0].device
        self.kernels: PagedKernels = self.make_kernels(spec, cache)
        self.gathered = PagedAttention(spec, cache)

    @staticmethod
    def make_kernels(spec: ModelSpec, cache: KvCache) -> PagedKernels:
        return TorchKernels(spec, cache)

    @staticmethod
    def why_not(site: AttentionSite) -> tuple[str, ...]:
        reasons = list(why_not_latent(site))
        if site.device.type == "cpu":
            reasons.append("gathers whole tables, which only CUDA graphs make up for")
        if site.kv_dtype == "int4":
            reasons.append("reads no KV cache in INT4")
        return tuple(reasons)

    def prepare(self, runs: Sequence[Run]) -> Attend:
        runs = stored_runs(runs, self.cache.block_size)
        ints = PackedInts()
        slots = ints.add(chain.from_iterable(slots_of(run, self.cache.block_size) for run in runs))
        build = self.pack(runs, ints)
        packed = ints.copy_to(self.device)
        return build(packed, packed[slots])

    def pack(self, runs: Sequence[Run], ints: PackedInts) -> Callable[[Tensor, Tensor], TableStep]:
        """Pack the tables of a step; the result builds the step from the ints on the device and
        the slots of its rows. `runs` are stored ones."""
        if all(len(run.tokens) == 1 for run in runs):
            tables = _pack_decode(runs, self.cache.block_size, ints)
            return lambda packed, slots_T: DecodeStep(self, tables(packed, slots_T))
        return _pack_mixed(self, runs, ints)

    def step(self, tables: DecodeTables) -> DecodeStep:
        """A step whose tables are on the device already."""
        return DecodeStep(self, tables)


class TableStep:
    """The attention of one step over block tables: storing, then attending."""

    def __init__(self, owner: TableAttention, slots_T: Tensor) -> None:
        self.owner, self.kernels, self.cache = owner, owner.kernels, owner.cache
        self.slots_T = slots_T

    def __call__(
        self, q_THD: Tensor, kv_T2KD: Tensor, layer: int, sinks_H: Tensor | None = None
    ) -> Tensor:
        self.kernels.store(kv_T2KD, self.slots_T, layer)
        return self.attend_stored(q_THD, kv_T2KD, layer, sinks_H)

    def attend_stored(
        self, q_THD: Tensor, kv_T2KD: Tensor, layer: int, sinks_H: Tensor | None = None
    ) -> Tensor:
        """The same once keys and values are in the cache."""
        raise NotImplementedError

    def attend_latent(self, q_THD: Tensor, rows_TW: Tensor, layer: int, up: LatentUp) -> Tensor:
        """o_THV over latent rows, after storing the new ones."""
        self.kernels.store_latent(rows_TW, self.slots_T, layer)
        return self.attend_latent_stored(q_THD, rows_TW, layer, up)

    def attend_latent_stored(
        self, q_THD: Tensor, rows_TW: Tensor, layer: int, up: LatentUp
    ) -> Tensor:
        """The same once the rows are in the cache."""
        raise NotImplementedError

    def decode_latent(
        self, q_SHD: Tensor, tables: DecodeTables, layer: int, up: LatentUp
    ) -> Tensor:
        """o_SHV of rows that decode."""
        q_SHW = up.absorb(q_SHD)
        return up.values_of(self.kernels.decode_latent(q_SHW, tables, layer, up.rank))


class DecodeStep(TableStep):
    """Every row decodes."""

    def __init__(self, owner: TableAttention, tables: DecodeTables) -> None:
        super().__init__(owner, tables.slots_S)
        self.tables = tables

    def attend_stored(
        self, q_THD: Tensor, kv_T2KD: Tensor, layer: int, sinks_H: Tensor | None = None
    ) -> Tensor:
        return self.kernels.decode(q_THD, self.tables, layer, sinks_H)

    def attend_latent_stored(
        self, q_THD: Tensor, rows_TW: Tensor, layer: int, up: LatentUp
    ) -> Tensor:
        return self.decode_latent(q_THD, self.tables, layer, up)


class MixedStep(TableStep):
    """Prompts from their start, decoding rows, and chunks of longer runs, each by its own path.

    `spans` are the prompts and the chunks: prompts that need masks or scores take the chunks' path.
    `long_runs` are those runs, in the order of `spans`, and their rows.
    """

    def __init__(
        self,
        owner: TableAttention,
        runs: Sequence[Run],
        long_runs: Sequence[tuple[Run, range]],
        slots_T: Tensor,
        decode: tuple[Tensor, DecodeTables] | None,
        chunks: tuple[Tensor, ChunkTables] | None,
        spans: tuple[Tensor, ChunkTables] | None,
    ) -> None:
        super().__init__(owner, slots_T)
        self.decode, self.chunks, self.spans = decode, chunks, spans
        self.long_runs = long_runs
        self.prompts = [slice(own.start, own.stop) for run, own in long_runs if run.start == 0]
        self.gathered = _Lazy(owner, runs)

    def attend_stored(
        self, q_THD: Tensor, kv_T2KD: Tensor, layer: int, sinks_H: Tensor | None = None
    ) -> Tensor:
        attention = self.owner.attentions[layer]
        is_plain = self._is_plain(attention)
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        paged = self.chunks if is_plain else self.spans
        if paged is not None:
            rows, chunks = paged
            o_CHD = self.kernels.prefill(q_THD.index_select(0, rows), chunks, layer, sinks_H)
            if o_CHD is None:
                return self.gathered(q_THD, kv_T2KD, layer, sinks_H)
            out_THD.index_copy_(0, rows, o_CHD)
        if self.decode is not None:
            rows, tables = self.decode
            o_SHD = self.kernels.decode(q_THD.index_select(0, rows), tables, layer, sinks_H)
            out_THD.index_copy_(0, rows, o_SHD)
        for own in self.prompts if is_plain else ():
            out_THD[own] = attend_prompt(q_THD[own], kv_T2KD[own], attention)
        return out_THD

    def attend_latent_stored(
        self, q_THD: Tensor, rows_TW: Tensor, layer: int, up: LatentUp
    ) -> Tensor:
        attention, cache = self.owner.attentions[layer], LayerCache(self.cache, layer)
        out_THV = q_THD.new_empty((*q_THD.shape[:2], up.value_HVR.shape[1]))
        if self.decode is not None:
            rows, tables = self.decode
            o_SHV = self.decode_latent(q_THD.index_select(0, rows), tables, layer, up)
            out_THV.index_copy_(0, rows, o_SHV)
        tables_RM = () if self.spans is None else self.spans[1].tables_RM
        for (run, own), table_M in zip(self.long_runs, tables_RM, strict=True):
            end = run.start + len(run.tokens)
            used_M = table_M[: -(-end // self.cache.block_size)]
            rows_LW = cache.gather(used_M, 1)[0, 0, 0, :end]
            place = slice(own.start, own.stop)
            out_THV[place] = attend_run(q_THD[place], rows_LW, run.start, attention, up)
        return out_THV

    def _is_plain(self, attention: AttentionSpec) -> bool:
        """Whether prompts of this layer need no explicit scores or masks, nor its cache's format.

        A prompt that attended to its unrounded keys would differ from the same prompt in chunks.
        """
        if not self.prompts:
            return True
        longest = max(rows.stop - rows.start for rows in self.prompts)
        plain = self.cache.format.dtype == self.cache.dtype
        return plain and not needs_scores(attention) and _sees_all(attention, longest)


class _Lazy:
    """The gather over the whole step, built when a layer first needs it."""

    def __init__(self, owner: TableAttention, runs: Sequence[Run]) -> None:
        self.owner, self.runs = owner, runs
        self.step: Attend | None = None

    def __call__(
        self, q_THD: Tensor, kv_T2KD: Tensor, layer: int, sinks_H: Tensor | None = None
    ) -> Tensor:
        if self.step is None:
            self.step = self.owner.gathered.prepare(self.runs)
        return self.step(q_THD, kv_T2KD, layer, sinks_H)


def attend_prompt(q_THD: Tensor, kv_T2KD: Tensor, attention: AttentionSpec) -> Tensor:
    """Causal attention of one sequence from position 0 to its own keys."""
    q_1HTD = q_THD.transpose(0, 1).unsqueeze(0)
    k_1KTD, v_1KTD = kv_T2KD.permute(1, 2, 0, 3).unsqueeze(1)
    o_1HTD = F.scaled_dot_product_attention(
        q_1HTD, k_1KTD, v_1KTD, is_causal=True, scale=attention.scale, enable_gqa=True
    )
    return o_1HTD[0].transpose(0, 1)


def _sees_all(attention: AttentionSpec, length: int) -> bool:
    return KeySpan.of(attention).first_seen(length - 1) == 0


def slots_of(run: Run, block_size: int) -> list[int]:
    """The slot of every row of a run."""
    positions = range(run.start, run.start + len(run.tokens))
    return [run.blocks[p // block_size] * block_size + p % block_size for p in positions]


def _pack_decode(
    runs: Sequence[Run], block_size: int, ints: PackedInts
) -> Callable[[Tensor, Tensor], DecodeTables]:
    """Pack the tables of runs of one token each."""
    lens = ints.add(run.start + 1 for run in runs)
    table = _pack_tables(runs, block_size, ints)
    return lambda packed, slots_S: DecodeTables(slots_S, packed[lens], table(packed))


def _pack_chunks(
    runs: Sequence[Run], block_size: int, ints: PackedInts
) -> Callable[[Tensor, Tensor], ChunkTables]:
    """Pack the tables of runs of several tokens."""
    counts = [len(run.tokens) for run in runs]
    starts = ints.add(accumulate(counts, initial=0))
    lens = ints.add(run.start + len(run.tokens) for run in runs)
    table, most = _pack_tables(runs, block_size, ints), max(counts)
    return lambda packed, _: ChunkTables(packed[starts], packed[lens], table(packed), most)


def _pack_mixed(
    owner: TableAttention, runs: Sequence[Run], ints: PackedInts
) -> Callable[[Tensor, Tensor], MixedStep]:
    """Sort the runs into the three paths of a mixed step, and pack their tables."""
    size = owner.cache.block_size
    firsts = list(accumulate((len(run.tokens) for run in runs), initial=0))
    prompts: list[tuple[Run, range]] = []
    singles: list[tuple[Run, range]] = []
    others: list[tuple[Run, range]] = []
    for first, run in zip(firsts, runs, strict=False):
        rows = range(first, first + len(run.tokens))
        is_prompt = run.start == 0 and len(run.tokens) > 1
        kind = prompts if is_prompt else singles if len(run.tokens) == 1 else others
        kind.append((run, rows))
    decode = _with_rows(singles, _pack_decode, size, ints)
    chunks = _with_rows(others, _pack_chunks, size, ints)
    spans = _with_rows(prompts + others if prompts else [], _pack_chunks, size, ints)

    def build(packed: Tensor, slots_T: Tensor) -> MixedStep:
        later = chunks(packed, slots_T)
        every = spans(packed, slots_T) if prompts else later
        decoding, long_runs = decode(packed, slots_T), [*prompts, *others]
        return MixedStep(owner, runs, long_runs, slots_T, decoding, later, every)

    return build


def _with_rows(
    members: Sequence[tuple[Run, range]],
    pack: Callable[[Sequence[Run], int, PackedInts], Callable[[Tensor, Tensor], Tables]],
    block_size: int,
    ints: PackedInts,
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tables] | None]:
    """Pack the rows and the tables of some runs of a step; these are None without runs."""
    if not members:
        return lambda *_: None
    place = ints.add(chain.from_iterable(rows for _, rows in members))
    tables = pack([run for run, _ in members], block_size, ints)

    def build(packed: Tensor, slots_T: Tensor) -> tuple[Tensor, Tables]:
        rows = packed[place].long()
        return rows, tables(packed, slots_T[rows])

    return build


def _pack_tables(
    runs: Sequence[Run], block_size: int, ints: PackedInts
) -> Callable[[Tensor], Tensor]:
    """Pack the blocks of each run up to its last row, padded with its last block."""
    used = [run.blocks[: (run.start + len(run.tokens) - 1) // block_size + 1] for run in runs]
    width = max(map(len, used))
    rows = ([*(max(0, b) for b in own), *[own[-1]] * (width - len(own))] for own in used)
    place = ints.add(chain.from_iterable(rows))
    return lambda packed: packed[place].view(len(runs), width)
