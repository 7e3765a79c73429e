"""The layers of one rank: those of its stage, between the stages before and after it."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.attention.base import Attend
from ridgeline.engine.model.base import DecoderBody
from ridgeline.engine.parallel.exchange.base import Collectives
from ridgeline.modelspec.shard import Shard, Span, split


class NoTable:
    """Stands for the embedding table and the LM head in stages that have neither."""

    nbytes = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def rows(self, tokens_T: Tensor) -> Tensor:
        raise AssertionError("only the first stage embeds tokens")

    def __call__(self, x_TI: Tensor) -> Tensor:
        raise AssertionError("only the first stage computes logits")


class RankForward:
    """Layers as torch operators, whose linears and experts exchange what they must.

    The first stage embeds, the last one normalises and returns the states to the first, which has
    the LM head. In other stages the result is not meant to be read. With `divides_rows`, each place
    of a stage computes a part of the step's rows.
    """

    def __init__(
        self,
        body: DecoderBody,
        shard: Shard,
        collectives: Collectives,
        divides_rows: bool = False,
    ) -> None:
        self.body, self.shard, self.collectives = body, shard, collectives
        self.divides_rows = divides_rows

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, end: int, attend: Attend) -> Tensor:
        body, shard = self.body, self.shard
        rows = self._rows(len(tokens_T), shard.place)
        own = slice(rows.start, rows.stop)
        shape = (len(rows), body.spec.hidden_size)
        if shard.is_first_stage:
            x_TC = body.table.rows(tokens_T)[own].to(body.dtype)
            if body.embed_scale != 1.0:
                x_TC = x_TC * body.embed_scale
        else:
            x_TC = self.collectives.receive(self._empty(shape), shard.stage - 1)
        x_TC = self._layers(x_TC, tokens_T[own], positions_T[own], end, attend)
        if shard.is_last_stage:
            x_TC = self._norm(x_TC)
            if not shard.is_first_stage:
                self.collectives.send(x_TC, 0)
        else:
            self.collectives.send(x_TC, shard.stage + 1)
            if shard.is_first_stage:
                last = shard.sizes.pipeline - 1
                x_TC = self.collectives.receive(self._empty(shape), last)
        return self._all_rows(x_TC, len(tokens_T)) if shard.is_first_stage else x_TC

    def _empty(self, shape: tuple[int, int]) -> Tensor:
        return torch.empty(shape, dtype=self.body.dtype, device=self.body.table.device)

    def _rows(self, num_rows: int, place: int) -> Span:
        """The rows of a step that a place computes."""
        if not self.divides_rows:
            return Span(0, num_rows)
        return split(num_rows, self.shard.sizes.stage_ranks, place)

    def _all_rows(self, x_TC: Tensor, num_rows: int) -> Tensor:
        if not self.divides_rows:
            return x_TC
        places = range(self.shard.sizes.stage_ranks)
        counts = [len(self._rows(num_rows, place)) for place in places]
        return torch.cat(self.collectives.gather_rows(x_TC, counts))

    def _layers(
        self, x_TC: Tensor, tokens_T: Tensor, positions_T: Tensor, end: int, attend: Attend
    ) -> Tensor:
        """The states after the layers of the stage; may reuse `x_TC`."""
        rotations = self.body.ropes.at(positions_T, end)
        for layer, block in enumerate(self.body.blocks):
            x_TC = block(x_TC, rotations, attend, layer)
        return x_TC

    def _norm(self, x_TC: Tensor) -> Tensor:
        return self.body.norm(x_TC)
