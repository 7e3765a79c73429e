"""Which rows of a step each rank of a stage computes, and sums and norms over a part of them.

What. Ranks that divide the KV cache may compute different rows of a step. Within them, sequence
parallelism gives each rank that splits heads and widths a part of the rows to normalise and to add
to: norms and residuals run on an N-th of the rows, which are gathered before each product and
summed into their parts behind it.

    own rows ─norm─ gather ─ qkv · attention · o ─ sum of own rows ─ + ─norm─ gather ─ mlp ─ sum …

Source. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv:2205.05198), section 4.2.2.

Invariant. Norms and residuals compute each row alone, and a row's parts are added in the order of
places, so no bit differs from ranks that each normalise all rows.

When it loses. It exchanges the same bytes in twice as many messages. Steps of few rows, such as
decodes, wait for them and save next to nothing.

Shape legend: T rows, t rows of this rank, C hidden_size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ridgeline.engine.parallel.exchange.base import Collectives
from ridgeline.modelspec.shard import Shard, Span, split


class StepRows:
    """The division of the rows of the current step, which `begin` sets.

    Attributes:
        computed: Rows that attention and products of this rank compute.
        own: Rows among them of whose residual this rank has the sum.
        counts: Own rows of each rank that splits heads and widths with this one.
    """

    def __init__(self, shard: Shard, collectives: Collectives, divides_context: bool) -> None:
        self._shard, self._collectives = shard, collectives
        self._divides_context = divides_context
        self.begin(0)

    def begin(self, num_rows: int) -> None:
        """Divide the rows of a step."""
        shard = self._shard
        self._context_counts = [
            len(self._of_context(num_rows, index)) for index in range(shard.sizes.context)
        ]
        self.computed = self._of_context(num_rows, shard.context_index)
        num_parts = shard.sizes.tensor if shard.sizes.sequence else 1
        parts = [split(len(self.computed), num_parts, index) for index in range(num_parts)]
        self.counts = [len(part) for part in parts]
        self.part = parts[shard.tensor_index if shard.sizes.sequence else 0]
        start = self.computed.start + self.part.start
        self.own = Span(start, start + len(self.part))

    def _of_context(self, num_rows: int, index: int) -> Span:
        if not self._divides_context:
            return Span(0, num_rows)
        return split(num_rows, self._shard.sizes.context, index)

    def gather_computed(self, x_tC: Tensor) -> Tensor:
        """The rows that this rank computes, of each rank's own ones."""
        if not self._shard.sizes.sequence:
            return x_tC
        return torch.cat(self._collectives.tensor.gather_rows(x_tC.contiguous(), self.counts))

    def gather_all(self, x_tC: Tensor) -> Tensor:
        """All rows of the step, of each rank's own ones."""
        x_tC = self.gather_computed(x_tC)
        if not self._divides_context:
            return x_tC
        return torch.cat(self._collectives.context.gather_rows(x_tC, self._context_counts))


class RowSums(Protocol):
    """How the partial products of ranks that split an input are added."""

    def floats(self, part_TO: Tensor) -> Tensor:
        """Sums in the order of places; may reuse `part_TO`."""
        ...

    def integers(self, part_TO: Tensor) -> Tensor:
        """Sums of int32."""
        ...

    def own(self, x_TO: Tensor) -> Tensor:
        """The rows of which this rank gets the sums."""
        ...


class AllRows:
    """Every rank gets the sums of all rows."""

    def __init__(self, collectives: Collectives) -> None:
        self._group = collectives.tensor

    def floats(self, part_TO: Tensor) -> Tensor:
        return self._group.sum_parts(part_TO)

    def integers(self, part_TO: Tensor) -> Tensor:
        return self._group.sum_integers(part_TO)

    def own(self, x_TO: Tensor) -> Tensor:
        return x_TO


class OwnRows:
    """Every rank gets the sums of its own rows: sequence parallelism."""

    def __init__(self, collectives: Collectives, rows: StepRows) -> None:
        self._group, self._rows = collectives.tensor, rows

    def floats(self, part_TO: Tensor) -> Tensor:
        return self._group.sum_rows(part_TO, self._rows.counts)

    def integers(self, part_TO: Tensor) -> Tensor:
        return self._group.sum_rows(part_TO, self._rows.counts)

    def own(self, x_TO: Tensor) -> Tensor:
        return x_TO[self._rows.part.start : self._rows.part.stop]


class GatheredNorm:
    """The norm of this rank's rows, followed by those of the others."""

    __slots__ = ("_rows", "norm")

    def __init__(self, norm: Callable[[Tensor], Tensor], rows: StepRows) -> None:
        self.norm, self._rows = norm, rows

    def __call__(self, x_tC: Tensor) -> Tensor:
        return self._rows.gather_computed(self.norm(x_tC))


class OwnRowsOf:
    """A layer that computes all rows on every rank, of which this rank keeps its own."""

    __slots__ = ("_sums", "inner")

    def __init__(self, inner: Callable[[Tensor], Tensor], sums: OwnRows) -> None:
        self.inner, self._sums = inner, sums

    def __call__(self, x_TC: Tensor) -> Tensor:
        return self._sums.own(self.inner(x_TC))
