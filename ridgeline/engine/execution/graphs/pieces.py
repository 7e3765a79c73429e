"""Steps with prompts in them as CUDA graphs of the parts between two attention calls.

    graph 0 ─▶ attention ─▶ graph 1 ─▶ attention ─▶ … ─▶ graph L
    embedding, q k v      o, MLP, next q k v          last norm

What. A step that mixes prompts with decoding has another shape each time: the number of prompts,
their lengths, their contexts. Only attention needs to know. Everything between two of its calls
works on rows, so it is captured for a number of rows (`token_sizes`), padded up to it, and
replayed; the attention of the real rows runs eagerly between, with the step's own tables. What an
expert layer computes runs eagerly too where its shapes depend on the routing (`MoeMlp.boundary`).

A capture runs the layers once with an attention that ends one graph and begins the next. So each
kind of layers is captured as it is. Queries, keys, values and results cross the boundary in buffers
that all layers and all sizes share: their addresses never change. All integers of a step are
copied to the device at once; the tokens, positions and slots go from there to the place that the
graphs read.

Source. vLLM's piecewise CUDA graphs (docs.vllm.ai, design/cuda_graphs).

Invariant. The states equal those of the eager step: the same operators on the same rows. Rows of
padding write to a block that no sequence has.

When it loses. Steps of more than `MAX_TOKENS` rows are bound by arithmetic and run eagerly. Padding
costs up to a third of the rows. The first step of a size takes as long as four.

Shape legend: T rows of a step, R rows of its size, F fields of a row, H query heads, K key
heads, D head_dim, C hidden_size, S sampled rows.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from ridgeline.engine.attention.base import Attend, Attention
from ridgeline.engine.attention.groups import GroupedAttention, GroupedStep
from ridgeline.engine.attention.latent import LatentUp
from ridgeline.engine.attention.tables import PackedInts, TableAttention, TableStep, slots_of
from ridgeline.engine.execution.batch import sampled_rows
from ridgeline.engine.execution.graphs.buckets import smallest_fitting
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.model.moe import MoeMlp, routed_experts
from ridgeline.engine.scheduler.plan import Run, stored_runs

MAX_TOKENS = 512
"""Steps of more rows are bound by arithmetic, and the time between kernels is hidden behind it."""
_SIZES = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384)
_FIELDS = 2  # tokens and positions; then the slots of each group of layers


class PieceCapture(Protocol):
    """Captures one graph after another, all in one pool of memory."""

    def session(self) -> AbstractContextManager[None]:
        """The surroundings of a capture, and of the runs that warm up for it."""
        ...

    def begin(self) -> None:
        """From here on, work on the device is recorded and not done."""
        ...

    def end(self) -> Callable[[], None]:
        """Ends what `begin` began; the result does the recorded work."""
        ...


class CudaPieces:
    """CUDA graphs, captured on a separate stream."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        torch.cuda.synchronize()
        gc.collect()
        current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            self._abandon()
            current.wait_stream(stream)

    def _abandon(self) -> None:
        """End a capture that an error left open; CUDA says again that it is not valid."""
        graph, self._graph = self._graph, None
        if graph is not None:
            with suppress(RuntimeError):
                graph.capture_end()

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Callable[[], None]:
        graph, self._graph = self._graph, None
        assert graph is not None, "begin was not called"
        graph.capture_end()
        return graph.replay


Steps = Sequence[TableStep]
"""The attention of a step, of each group of layers that share block tables."""

Part = Callable[[Steps, int], object]
"""A graph, or what runs eagerly between two: given the step's attention and its number of rows."""


@dataclass(frozen=True)
class Pieces:
    """The parts of one size in order, the integers that they read, and the states they leave."""

    fields_FR: Tensor
    parts: tuple[Part, ...]
    x_RC: Tensor


@dataclass
class PieceCounts:
    """What was captured and replayed; `capture_s` includes compiling kernels."""

    num_sizes: int = 0
    num_graphs: int = 0
    num_replays: int = 0
    capture_s: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """The totals, under the names of the engine's counters."""
        return {
            "num_piecewise_graphs": float(self.num_graphs),
            "num_piecewise_replays": float(self.num_replays),
            "piecewise_capture_s": self.capture_s,
        }


class PiecewiseGraphs:
    """Computes the hidden states of steps of any runs, up to a number of rows.

    `max_len` is the longest sequence in tokens. The cache's last block is for padding. With
    `keep_states`, the states that a call returns stay valid after the next step.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: Attention,
        max_len: int,
        capture: PieceCapture,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self._decoder, self._attention, self._capture = decoder, attention, capture
        self._groups = table_groups(attention)
        cache = self._groups[0].cache
        self._max_len, self._block_size = max_len, cache.block_size
        self._padding_slot = (cache.num_blocks - 1) * cache.block_size
        self.sizes = token_sizes(max_tokens)
        self._sizes: dict[int, Pieces] = {}
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        self.counts, self.keep_states = PieceCounts(), False
        # A graph keeps the address of these tables, so they must not grow afterwards.
        decoder.body.ropes.tables_up_to(max_len)

    def describe(self) -> str:
        """What is captured, and when."""
        return (
            f"steps of up to {self.sizes[-1]} rows with prompts from CUDA graphs between attention"
            f" calls, captured when a step first needs their size ({self.counts.num_sizes} were)"
        )

    def can_run(self, runs: Sequence[Run]) -> bool:
        """Whether a step of these runs has a size."""
        return 0 < sum(len(run.tokens) for run in runs) <= self.sizes[-1]

    @torch.inference_mode()
    def __call__(self, runs: Sequence[Run]) -> tuple[Tensor, Callable[[], Tensor]]:
        """The states x_TC, and what returns the rows_S after which a token is sampled; the states
        are valid until the next step."""
        num_rows = sum(len(run.tokens) for run in runs)
        size = smallest_fitting(self.sizes, num_rows)
        assert size is not None, "can_run was not asked"
        pieces = self._sizes.get(size) or self._make(size)
        steps, rows_S = self._fill(pieces.fields_FR, runs)
        for part in pieces.parts:
            part(steps, num_rows)
        self.counts.num_replays += 1
        x_TC = pieces.x_RC[:num_rows]
        return (x_TC.clone() if self.keep_states else x_TC), lambda: rows_S

    def _fill(self, fields_FR: Tensor, runs: Sequence[Run]) -> tuple[Steps, Tensor]:
        """Copy a step's integers to the device; returns its attention and its sampled rows."""
        size, ints = self._block_size, PackedInts()
        own: list[Sequence[Run]] = [runs]
        if isinstance(self._attention, GroupedAttention):
            own = self._attention.runs_of(runs)
        stored = [stored_runs(group_runs, size) for group_runs in own]
        tokens = list(chain.from_iterable(run.tokens for run in runs))
        padding = fields_FR.shape[1] - len(tokens)
        positions = chain.from_iterable(
            range(run.start, run.start + len(run.tokens)) for run in runs
        )
        ints.add(chain(tokens, [0] * padding))
        fields = ints.add(chain(positions, [0] * padding))
        places = []
        for group_runs in stored:
            slots = chain.from_iterable(slots_of(run, size) for run in group_runs)
            fields = ints.add(chain(slots, [self._padding_slot] * padding))
            places.append(slice(fields.start, fields.start + len(tokens)))
        builds = [
            group.pack(group_runs, ints)
            for group, group_runs in zip(self._groups, stored, strict=True)
        ]
        sampled = ints.add(sampled_rows(runs))
        packed = ints.copy_to(self._decoder.device)
        fields_FR.copy_(packed[: fields.stop].view_as(fields_FR))
        steps = [build(packed, packed[place]) for build, place in zip(builds, places, strict=True)]
        return steps, packed[sampled]

    def _make(self, size: int) -> Pieces:
        """Capture the graphs of a size, on rows of padding."""
        began_s = time.perf_counter()
        decoder = self._decoder
        num_fields = _FIELDS + len(self._groups)
        fields_FR = torch.zeros(num_fields, size, dtype=torch.int32, device=decoder.device)
        fields_FR[_FIELDS:] = self._padding_slot
        with self._capture.session():
            for _ in range(2):  # compiles and tunes kernels, which a capture must not
                self._run(fields_FR, _Cuts(None))
            cuts = _Cuts(self._capture)
            self._capture.begin()
            x_RC = self._run(fields_FR, cuts)
            cuts.end()
        self._sizes[size] = pieces = Pieces(fields_FR, tuple(cuts.parts), x_RC)
        self.counts.num_sizes += 1
        self.counts.num_graphs += cuts.num_graphs
        self.counts.capture_s += time.perf_counter() - began_s
        return pieces

    def _run(self, fields_FR: Tensor, cuts: _Cuts) -> Tensor:
        """The layers over rows of padding, cut at each attention call and each expert layer whose
        shapes depend on the routing."""
        boundaries = [
            _Boundary(group, fields_FR[_FIELDS + index], cuts, self._buffer, index)
            for index, group in enumerate(self._groups)
        ]
        boundary: Attend = boundaries[0]
        if isinstance(self._attention, GroupedAttention):
            boundary = GroupedStep(self._attention.group_of, tuple(boundaries))

        def route(experts: MoeMlp, x_RC: Tensor) -> Tensor:
            rows_in, rows_out = (self._buffer(side, x_RC) for side in ("x", "y"))
            rows_in.copy_(x_RC)
            cuts(lambda _, n: rows_out[:n].copy_(experts.compute(rows_in[:n])))
            return rows_out

        eager = [
            experts
            for experts in routed_experts(self._decoder.body.blocks)
            if not experts.has_fixed_shapes
        ]
        for experts in eager:
            experts.boundary = route
        try:
            return self._decoder.hidden(fields_FR[0], fields_FR[1], self._max_len, boundary)
        finally:
            for experts in eager:
                experts.boundary = None

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        """Rows shaped as those of `like`, in memory that stays where it is."""
        key = (name, tuple(like.shape[1:]), like.dtype)
        if key not in self._buffers:
            shape = (self.sizes[-1], *like.shape[1:])
            self._buffers[key] = torch.zeros(shape, dtype=like.dtype, device=like.device)
        return self._buffers[key][: len(like)]


class _Cuts:
    """Ends a graph, adds what runs eagerly, begins the next; without a capture it does nothing."""

    def __init__(self, capture: PieceCapture | None) -> None:
        self._capture = capture
        self.parts: list[Part] = []
        self.num_graphs = 0

    def __call__(self, eager: Part) -> None:
        if self._capture is not None:
            self.end()
            self.parts.append(eager)
            self._capture.begin()

    def end(self) -> None:
        """End the last graph."""
        assert self._capture is not None
        replay = self._capture.end()
        self.parts.append(lambda _, __: replay())
        self.num_graphs += 1


class _Boundary(TableStep):
    """The attention of a capture: storing belongs to the graph, attending to no graph."""

    def __init__(
        self,
        owner: TableAttention,
        slots_R: Tensor,
        cuts: _Cuts,
        buffer: Callable[[str, Tensor], Tensor],
        group: int,
    ) -> None:
        super().__init__(owner, slots_R)
        self._cuts, self._buffer, self._group = cuts, buffer, group

    def attend_stored(
        self, q_THD: Tensor, kv_T2KD: Tensor, layer: int, sinks_H: Tensor | None = None
    ) -> Tensor:
        q_RHD, kv_R2KD = self._buffer("q", q_THD), self._buffer("kv", kv_T2KD)
        o_RHD = self._buffer("o", q_THD)
        q_RHD.copy_(q_THD)
        kv_R2KD.copy_(kv_T2KD)

        def attend(steps: Steps, n: int) -> None:
            step = steps[self._group]
            o_RHD[:n].copy_(step.attend_stored(q_RHD[:n], kv_R2KD[:n], layer, sinks_H))

        self._cuts(attend)
        return o_RHD

    def attend_latent_stored(
        self, q_THD: Tensor, rows_TW: Tensor, layer: int, up: LatentUp
    ) -> Tensor:
        like = q_THD.new_empty((*q_THD.shape[:2], up.value_HVR.shape[1]))
        q_RHD, rows_RW, o_RHV = (
            self._buffer(*pair) for pair in (("q", q_THD), ("rows", rows_TW), ("o", like))
        )
        q_RHD.copy_(q_THD)
        rows_RW.copy_(rows_TW)

        def attend(steps: Steps, n: int) -> None:
            step = steps[self._group]
            o_RHV[:n].copy_(step.attend_latent_stored(q_RHD[:n], rows_RW[:n], layer, up))

        self._cuts(attend)
        return o_RHV


def table_groups(attention: Attention) -> tuple[TableAttention, ...]:
    """The attention of each group of layers that share block tables; () if one has no tables."""
    groups = attention.groups if isinstance(attention, GroupedAttention) else (attention,)
    tables = tuple(group for group in groups if isinstance(group, TableAttention))
    return tables if len(tables) == len(groups) else ()


def token_sizes(max_tokens: int) -> tuple[int, ...]:
    """The numbers of rows that graphs have, in ascending order; the last is `max_tokens`."""
    return (*(size for size in _SIZES if size < max_tokens), max_tokens)


def make_piecewise_graphs(
    decoder: Decoder, attention: Attention, max_len: int, max_tokens: int
) -> PiecewiseGraphs | None:
    """Graphs for steps with prompts on a GPU; None elsewhere, or without block tables."""
    if decoder.device.type != "cuda" or not table_groups(attention):
        return None
    return PiecewiseGraphs(decoder, attention, max_len, CudaPieces(), min(max_tokens, MAX_TOKENS))
