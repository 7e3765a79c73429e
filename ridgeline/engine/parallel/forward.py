"""The layers of one rank: those of its stage, between the stages before and after it."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.attention.base import Attend
from ridgeline.engine.model.base import DecoderBody
from ridgeline.engine.parallel.collectives import Collectives
from ridgeline.modelspec.shard import Shard


class NoTable:
    """Stands for the embedding table and the LM head in stages that have neither."""

    nbytes = 0
    device = torch.device("cpu")

    def rows(self, tokens_T: Tensor) -> Tensor:
        raise AssertionError("only the first stage embeds tokens")

    def __call__(self, x_TI: Tensor) -> Tensor:
        raise AssertionError("only the first stage computes logits")


class RankForward:
    """Layers as torch operators, whose linears and experts exchange what they must.

    The first stage embeds, the last one normalises and returns the states to the first, which has
    the LM head. In other stages the result is not meant to be read.
    """

    def __init__(self, body: DecoderBody, shard: Shard, collectives: Collectives) -> None:
        self.body, self.shard, self.collectives = body, shard, collectives

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, end: int, attend: Attend) -> Tensor:
        body, shard = self.body, self.shard
        shape = (len(tokens_T), body.spec.hidden_size)
        if shard.is_first_stage:
            x_TC = body.table.rows(tokens_T).to(body.dtype)
            if body.embed_scale != 1.0:
                x_TC = x_TC * body.embed_scale
        else:
            x_TC = self.collectives.receive(torch.empty(shape, dtype=body.dtype), shard.stage - 1)
        x_TC = self._layers(x_TC, tokens_T, positions_T, end, attend)
        if shard.is_last_stage:
            x_TC = self._norm(x_TC)
            if not shard.is_first_stage:
                self.collectives.send(x_TC, 0)
            return x_TC
        self.collectives.send(x_TC, shard.stage + 1)
        if shard.is_first_stage:
            last = shard.sizes.pipeline - 1
            return self.collectives.receive(torch.empty(shape, dtype=body.dtype), last)
        return x_TC

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
