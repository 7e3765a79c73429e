"""The layers of one rank as native segments, between which ranks exchange partial sums.

What. A block is three native calls, and attention: norm · qkv · rope, the output projection, and
norm · gate_up · gate · down. The residual lies in a torch tensor, to which the exchanged branches
are added.

Invariant. Products, norms and gates are those of `NativeForward`, so a stage has the bits of one
process with native layers.

When it loses. Python and the threads are entered four times per layer, in one process once per
step.

Shape legend: T tokens of the step, C hidden_size.
"""

from __future__ import annotations

import torch
from torch import Tensor

import ridgeline._native as _native
from ridgeline.engine.attention.base import Attend
from ridgeline.engine.execution.layers.native import HeadViews, padded_rope_table
from ridgeline.engine.execution.layers.native_segments import (
    SplitBlock,
    heads_of,
    norm_segment,
    split_block,
)
from ridgeline.engine.kernels.native_linear import isa
from ridgeline.engine.model.base import DecoderBody
from ridgeline.engine.model.layers import (
    Block,
    GatedMlp,
    ScaledBranch,
    UngatedMlp,
    attention_of,
    no_norm,
)
from ridgeline.engine.parallel.exchange.base import Collectives
from ridgeline.engine.parallel.layers.forward import RankForward
from ridgeline.engine.parallel.layers.linears import RowParallelLinear
from ridgeline.engine.parallel.layers.rows import GatheredNorm, StepRows
from ridgeline.engine.quant.base import Linear
from ridgeline.modelspec.shard import Shard

OwnNorm = _native.FusedSegment | None


class NativeRankForward(RankForward):
    """One step at a time, because its segments share a frame."""

    def __init__(
        self, body: DecoderBody, shard: Shard, collectives: Collectives, rows: StepRows
    ) -> None:
        super().__init__(body, shard, collectives, rows)
        self._frame = _native.FusedFrame(isa())
        self._branches = [_last_linears(block) for block in body.blocks]
        # A norm of own rows only is a segment apart, before they are gathered.
        self._own_norms = [_own_norms(body, block) for block in body.blocks]
        self._segments = [
            split_block(body, _without_own_norms(block), _inner(o), _inner(down))
            for block, (o, down) in zip(body.blocks, self._branches, strict=True)
        ]
        self._last_norm = norm_segment(body, body.norm)
        self._step: _Step | None = None
        self._heads = [heads_of(attention_of(block.attention)) for block in body.blocks]
        self._tables: tuple[Tensor, ...] = ()
        self._rope_tables: tuple[Tensor, ...] = ()

    def _layers(
        self, x_TC: Tensor, tokens_T: Tensor, positions_T: Tensor, end: int, attend: Attend
    ) -> Tensor:
        self._update_rope_tables(end)
        x_TC, num_rows = x_TC.contiguous(), len(tokens_T)
        step = _Step(self._frame, tokens_T.contiguous(), positions_T.contiguous())
        self._step = step
        views = {shape: HeadViews(num_rows, *shape) for shape in dict.fromkeys(self._heads)}
        for layer, block in enumerate(self.body.blocks):
            split, (o, down) = self._segments[layer], self._branches[layer]
            view = views[self._heads[layer]]
            if not num_rows:  # another rank has them; this one has keys that they see
                attend(view.q_THD, view.kv_T2KD, layer, *attention_of(block.attention).sinks)
                continue
            before_heads, before_mlp = self._own_norms[layer]
            step.run(split.heads, self._gather(step, before_heads, x_TC), heads=view.heads_TXD)
            sinks = attention_of(block.attention).sinks
            attended_THD = attend(view.q_THD, view.kv_T2KD, layer, *sinks).contiguous()
            size = x_TC.shape[1]
            y_TC = step.run(split.output, attended_THD, size)
            self._add(step, split, 0, block, x_TC, y_TC, o)
            normed_TC = self._gather(step, before_mlp, x_TC)
            self._add(step, split, 1, block, x_TC, step.run(split.mlp, normed_TC, size), down)
        return x_TC

    def _gather(self, step: _Step, norm: OwnNorm, x_TC: Tensor) -> Tensor:
        """The rows that this rank computes; with sequence parallelism normed, without not yet."""
        if norm is not None and len(x_TC):
            x_TC = step.run(norm, x_TC, x_TC.shape[1])
        return self.rows.gather_computed(x_TC)

    def _norm(self, x_TC: Tensor) -> Tensor:
        if self._last_norm is None or not len(x_TC):
            return x_TC
        assert self._step is not None
        return self._step.run(self._last_norm, x_TC, x_TC.shape[1])

    def _add(
        self,
        step: _Step,
        split: SplitBlock,
        branch: int,
        block: Block,
        x_TC: Tensor,
        y_TC: Tensor,
        linear: Linear,
    ) -> None:
        """Add a branch to the residual, summed over the ranks and normed."""
        if isinstance(linear, RowParallelLinear):
            y_TC = linear.complete(y_TC)
        norm = split.norms[branch]
        if norm is not None and len(y_TC):
            y_TC = step.run(norm, y_TC, y_TC.shape[1])
        scaled = block.branch_norms[branch]
        if isinstance(scaled, ScaledBranch):
            y_TC = y_TC.mul_(scaled.factor)
        x_TC.add_(y_TC)

    def _update_rope_tables(self, end: int) -> None:
        tables = self.body.ropes.tables_up_to(end)
        if tables is self._tables:
            return
        self._rope_tables = tuple(map(padded_rope_table, tables))
        for rope, table_P2R in enumerate(self._rope_tables):
            num_positions, _, rotated = table_P2R.shape
            self._frame.set_rope(rope, table_P2R.data_ptr(), num_positions, rotated)
        self._tables = tables


class _Step:
    """The frame within one step; keeps the memory of its integers alive."""

    def __init__(self, frame: _native.FusedFrame, tokens_T: Tensor, positions_T: Tensor) -> None:
        self._frame = frame
        self._tokens_T, self._positions_T = tokens_T, positions_T
        self._threads = torch.get_num_threads()

    def run(
        self,
        segment: _native.FusedSegment,
        from_TX: Tensor,
        out_width: int | None = None,
        heads: Tensor | None = None,
    ) -> Tensor:
        """Run a segment on rows `from_TX`; returns the rows of `out_width` that it writes to `out`.

        Without `out_width` it writes none. Positions are read for all rows of the step only.
        """
        assert from_TX.is_contiguous() and from_TX.dtype == torch.float32
        out_TC = from_TX if out_width is None else from_TX.new_empty((len(from_TX), out_width))
        addresses = self._tokens_T.data_ptr(), self._positions_T.data_ptr()
        self._frame.begin(len(from_TX), *addresses, out_TC.data_ptr())
        into = 0 if heads is None else heads.data_ptr()
        segment.run(self._frame, from_TX.data_ptr(), into, self._threads)
        return out_TC


def _own_norms(body: DecoderBody, block: Block) -> tuple[OwnNorm, OwnNorm]:
    """The norms before attention and before the feed-forward layer, if each rank has a part of the
    rows."""
    norms = (block.attention_norm, block.mlp_norm)
    first, second = (
        norm_segment(body, norm.norm) if isinstance(norm, GatheredNorm) else None for norm in norms
    )
    return first, second


def _without_own_norms(block: Block) -> Block:
    norms = (block.attention_norm, block.mlp_norm)
    first, second = (no_norm if isinstance(norm, GatheredNorm) else norm for norm in norms)
    return Block(block.attention, block.mlp, (first, second), block.branch_norms, block.rope)


def _last_linears(block: Block) -> tuple[Linear, Linear]:
    mlp = block.mlp
    assert isinstance(mlp, GatedMlp | UngatedMlp)
    return attention_of(block.attention).o, mlp.down


def _inner(linear: Linear) -> Linear:
    return linear.inner if isinstance(linear, RowParallelLinear) else linear
