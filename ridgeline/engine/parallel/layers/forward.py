"""The layers of one rank: those of its stage, between the stages before and after it."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.attention.base import Attend
from ridgeline.engine.model.base import DecoderBody
from ridgeline.engine.parallel.exchange.base import Collectives
from ridgeline.engine.parallel.layers.rows import StepRows
from ridgeline.modelspec.shard import Shard


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
    the LM head. In other stages the result is not meant to be read. `rows` divides the rows of a
    step between the ranks of a stage.
    """

    def __init__(
        self, body: DecoderBody, shard: Shard, collectives: Collectives, rows: StepRows
    ) -> None:
        self.body, self.shard, self.collectives, self.rows = body, shard, collectives, rows

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, end: int, attend: Attend) -> Tensor:
        body, shard, rows = self.body, self.shard, self.rows
        rows.begin(len(tokens_T))
        own = slice(rows.own.start, rows.own.stop)
        computed = slice(rows.computed.start, rows.computed.stop)
        shape = (len(rows.own), body.spec.hidden_size)
        if shard.is_first_stage:
            x_TC = body.table.rows(tokens_T)[own].to(body.dtype)
            if body.embed_scale != 1.0:
                x_TC = x_TC * body.embed_scale
        else:
            x_TC = self.collectives.receive(self._empty(shape), shard.stage - 1)
        x_TC = self._layers(x_TC, tokens_T[computed], positions_T[computed], end, attend)
        if shard.is_last_stage:
            x_TC = self._norm(x_TC)
            if not shard.is_first_stage:
                self.collectives.send(x_TC, 0)
        else:
            self.collectives.send(x_TC, shard.stage + 1)
            if shard.is_first_stage:
                last = shard.sizes.pipeline - 1
                x_TC = self.collectives.receive(self._empty(shape), last)
        return rows.gather_all(x_TC) if shard.is_first_stage else x_TC

    def _empty(self, shape: tuple[int, int]) -> Tensor:
        return torch.empty(shape, dtype=self.body.dtype, device=self.body.table.device)

    def _layers(
        self, x_TC: Tensor, tokens_T: Tensor, positions_T: Tensor, end: int, attend: Attend
    ) -> Tensor:
        """The states of this rank's own rows after the layers of the stage; may reuse `x_TC`.

        Tokens and positions are those of the rows that this rank computes.
        """
        rotations = self.body.ropes.at(positions_T, end)
        for layer, block in enumerate(self.body.blocks):
            x_TC = block(x_TC, rotations, attend, layer)
        return x_TC

    def _norm(self, x_TC: Tensor) -> Tensor:
        return self.body.norm(x_TC)
