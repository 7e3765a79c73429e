"""Mixture of experts: each token runs through the few experts chosen by the router.

What. Tokens are sorted by expert, so each chosen expert runs once per step on all of its tokens,
and unused experts are not read. At small batches that is most of them, which is the whole gain.

Source. Shazeer et al. 2017 (arXiv 1701.06538); Mixtral (arXiv 2401.04088).

Invariant. A token's result is the sum of its experts' outputs in the order of its own ranking, so
it does not depend on the rest of the batch. When it loses. If the batch is just large enough to use
every expert for a token or two, all weights are read for little arithmetic. On an accelerator, the
number of tokens per expert is copied to the host once per layer.

Shape legend: T tokens, C hidden_size, E experts, X experts per token, P = T·X (token, expert)
pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.engine.model.layers import GatedMlp
from ridgeline.engine.quant.base import Linear
from ridgeline.modelspec.model import MlpSpec


class MoeMlp:
    """A router and its expert feed-forward layers."""

    __slots__ = ("experts", "norm_topk", "num_chosen", "router")

    def __init__(self, spec: MlpSpec, router: Linear, experts: Sequence[GatedMlp]) -> None:
        self.router, self.experts = router, tuple(experts)
        self.num_chosen, self.norm_topk = spec.experts_per_token, spec.norm_topk

    def __call__(self, x_TC: Tensor) -> Tensor:
        weight_TX, expert_TX = self.route(x_TC)
        expert_P = expert_TX.reshape(-1)
        order_P = torch.argsort(expert_P, stable=True)
        counts_E = torch.bincount(expert_P, minlength=len(self.experts)).tolist()
        x_PC = x_TC.index_select(0, order_P // self.num_chosen)
        parts = zip(self.experts, torch.split(x_PC, counts_E), strict=True)
        y_PC = torch.cat([expert(part) for expert, part in parts if len(part)])
        unsorted_PC = torch.empty_like(y_PC).index_copy_(0, order_P, y_PC)
        y_TXC = unsorted_PC.view(*weight_TX.shape, -1)
        return (y_TXC * weight_TX.unsqueeze(-1)).sum(dim=1)

    def route(self, x_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Weights_TX (dtype of x) and indices_TX of each token's experts, most probable first."""
        probs_TE = torch.softmax(self.router(x_TC).float(), dim=-1)
        weight_TX, expert_TX = torch.topk(probs_TE, self.num_chosen, dim=-1)
        if self.norm_topk:
            weight_TX = weight_TX / weight_TX.sum(dim=-1, keepdim=True)
        return weight_TX.to(x_TC.dtype), expert_TX
