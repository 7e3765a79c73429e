"""Experts spread over ranks: each rank computes the whole experts that it holds.

What. Every rank of a stage routes all tokens, computes its own experts' outputs for them, and the
outputs are exchanged before they are weighted and added.

Invariant. An output is computed by one rank and exchanged bit for bit; the sum over a token's
experts is that of `MoeMlp`, in the order of the token's own ranking. No bit differs from one
process.

When it loses. Each layer exchanges experts_per_token rows per token. A rank whose experts are not
chosen waits.

Shape legend: T tokens, C hidden_size, E experts of this rank, X experts per token, P = T·X (token,
expert) pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.engine.model.layers import GatedMlp
from ridgeline.engine.model.moe import MoeMlp
from ridgeline.engine.parallel.exchange.base import Collectives, merge_disjoint
from ridgeline.engine.quant.base import Linear
from ridgeline.modelspec.model import MlpSpec
from ridgeline.modelspec.shard import Span


class ExpertParallelMlp(MoeMlp):
    """A router over all experts, and the experts `own` of this rank."""

    __slots__ = ("_collectives", "own")

    def __init__(
        self,
        spec: MlpSpec,
        router: Linear,
        experts: Sequence[GatedMlp],
        correction_E: Tensor | None,
        own: Span,
        collectives: Collectives,
    ) -> None:
        super().__init__(spec, router, experts, correction_E)
        self.own, self._collectives = own, collectives

    def __call__(self, x_TC: Tensor) -> Tensor:
        weight_TX, expert_TX = self.route(x_TC)
        expert_P = expert_TX.reshape(-1)
        local_P = expert_P - self.own.start
        is_mine_P = (local_P >= 0) & (local_P < len(self.own))
        local_P = torch.where(is_mine_P, local_P, len(self.own))  # the others' pairs come last
        order_P = torch.argsort(local_P, stable=True)
        counts = torch.bincount(local_P, minlength=len(self.own) + 1).tolist()[: len(self.own)]
        order_P = order_P[: sum(counts)]
        x_PC = x_TC.index_select(0, order_P // self.num_chosen)
        if self.routing.weighs_inputs:
            x_PC = x_PC * weight_TX.reshape(-1, 1).index_select(0, order_P)
            weight_TX = torch.ones_like(weight_TX)
        y_PC = x_TC.new_zeros((len(expert_P), x_TC.shape[1]))
        parts = zip(self.experts, torch.split(x_PC, counts), strict=True)
        computed = [expert(part) for expert, part in parts if len(part)]
        if computed:
            y_PC.index_copy_(0, order_P, torch.cat(computed))
        y_TXC = merge_disjoint(self._collectives, y_PC).view(*weight_TX.shape, -1)
        return (y_TXC * weight_TX.unsqueeze(-1)).sum(dim=1)
