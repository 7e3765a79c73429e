"""What the ranks of a model exchange within a step.

Every sum has a fixed order: the parts of place 0, 1, … one after the other. So results depend on
the number of parts, but neither on which process computed a part nor on how it was sent, and every
rank has the same bits.

Shape legend: T rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class GroupCollectives(Protocol):
    """Exchanges among the `num_places` ranks of a group.

    Every rank of the group must call the same ones in the same order. Raises RankFailed where
    another rank does not answer.
    """

    place: int
    num_places: int

    def sum_parts(self, part: Tensor) -> Tensor:
        """The sum of every place's part, added in the order of places; may reuse `part`."""
        ...

    def sum_integers(self, part: Tensor) -> Tensor:
        """The sum of every place's integers (int32), in any order."""
        ...

    def sum_rows(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        """This place's rows of the sum of every place's part, added in the order of places.

        `part` has two dimensions, and place i takes the next `counts[i]` of its rows.
        """
        ...

    def maximum(self, part: Tensor) -> Tensor:
        """The element-wise maximum over places."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Fill `x` with that of place 0."""
        ...

    def gather_columns(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """At place 0, every place's columns side by side; elsewhere `part`."""
        ...

    def gather_rows(self, part: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Every place's rows, of which place i has `counts[i]`; `part` has two dimensions."""
        ...


class Collectives(GroupCollectives, Protocol):
    """Exchanges among the ranks of a stage, within two divisions of it, and between stages.

    `tensor` are the ranks that split heads and widths, `context` those that divide the positions of
    the KV cache (`Shard.tensor_members`, `Shard.context_members`).
    """

    tensor: GroupCollectives
    context: GroupCollectives

    def send(self, x: Tensor, stage: int) -> None:
        """Send to the same place of another stage; `x` is not written to until it has arrived."""
        ...

    def receive(self, x: Tensor, stage: int) -> Tensor:
        """Fill `x` from the same place of another stage."""
        ...


class ProcessCollectives(Collectives, Protocol):
    """Collectives among processes, which meet before they exchange anything."""

    def connect(self, store: str) -> None:
        """Meet the other ranks by what all of them name.

        That is the path of a new file, or tcp://HOST:PORT, where rank 0 will listen.
        """
        ...


def merge_disjoint(collectives: GroupCollectives, part: Tensor) -> Tensor:
    """The sum of parts of which at most one is non-zero at any index, bit for bit."""
    if collectives.num_places == 1:
        return part
    part = part.contiguous()
    if part.element_size() == 2:
        wide = part.view(torch.int16).to(torch.int32)
        return collectives.sum_integers(wide).to(torch.int16).view(part.dtype)
    return collectives.sum_integers(part.view(torch.int32)).view(part.dtype)
