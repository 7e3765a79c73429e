"""Mixture of experts: each token runs through the few experts chosen by the router.

What. Tokens are sorted by expert, so each chosen expert runs once per step on all of its tokens,
and unused experts are not read. At small batches that is most of them, which is the whole gain.

Source. Shazeer et al. 2017 (arXiv 1701.06538); Mixtral (arXiv 2401.04088).

Invariant. A token's result is the sum of its experts' outputs in the order of its own ranking, so
it does not depend on the rest of the batch.

On a GPU, experts of plain weights lie in one tensor (`MoeMlp.stack`), and up to `GROUPED_TOKENS`
tokens pass through Ridgeline's grouped kernel: tokens are sorted on the device, no count reaches
the host, and a CUDA graph can hold the layer.

When it loses. If the batch is just large enough to use every expert for a token or two, all weights
are read for little arithmetic. On an accelerator, with other weights or more tokens, the number of
tokens per expert is copied to the host once per layer.

Shape legend: T tokens, C hidden_size, E experts, X experts per token, P = T·X (token, expert)
pairs, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ridgeline.engine.kernels.triton import load
from ridgeline.engine.model.layers import Block, GatedMlp, Norm
from ridgeline.engine.quant.base import Linear
from ridgeline.engine.quant.dense import DenseLinear
from ridgeline.modelspec.model import MlpSpec

GROUPED_TOKENS = 512
"""Tokens of a step up to which stacked experts go through the grouped kernel, as in the largest
graph; with more of them per expert, the device's own products are nearer to its peak."""


class MoeMlp:
    """A router and its expert feed-forward layers.

    `correction_E` is added to the scores where experts are chosen (None: nothing is). `boundary`
    stands between the graphs before and after this layer while they are captured (None: this layer
    computes).
    """

    __slots__ = (
        "boundary",
        "correction_E",
        "experts",
        "norm_topk",
        "num_chosen",
        "router",
        "routing",
        "stacked",
    )

    def __init__(
        self,
        spec: MlpSpec,
        router: Linear,
        experts: Sequence[GatedMlp],
        correction_E: Tensor | None = None,
    ) -> None:
        self.router, self.experts = router, tuple(experts)
        self.num_chosen, self.norm_topk = spec.experts_per_token, spec.norm_topk
        self.routing, self.correction_E = spec.routing, correction_E
        self.boundary: Callable[[MoeMlp, Tensor], Tensor] | None = None
        self.stacked: tuple[Tensor, Tensor] | None = None

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether all shapes follow from the number of tokens, so that a graph can hold them."""
        return self.stacked is not None

    def stack(self) -> None:
        """Put the weights of all experts into two tensors, of which the experts keep views.

        Nothing changes for experts that are quantised, have biases or another gate than SiLU, or
        whose inputs the router weighs: the grouped kernel does not compute these.
        """
        if self.routing.weighs_inputs or any(e.activation != "silu" for e in self.experts):
            return
        sides = [[e.gate_up for e in self.experts], [e.down for e in self.experts]]
        if any(type(w) is not DenseLinear or w.bias_O is not None for side in sides for w in side):
            return
        both = []
        for side in sides:
            linears = [w for w in side if isinstance(w, DenseLinear)]
            weight_EOI = torch.stack([linear.weight_OI for linear in linears])
            for linear, weight_OI in zip(linears, weight_EOI, strict=True):
                linear.weight_OI = weight_OI
            both.append(weight_EOI)
        self.stacked = both[0], both[1]

    def __call__(self, x_TC: Tensor) -> Tensor:
        return self.compute(x_TC) if self.boundary is None else self.boundary(self, x_TC)

    def compute(self, x_TC: Tensor) -> Tensor:
        """The weighted sum of each token's experts."""
        return self.of_experts(x_TC, *self.route(x_TC))

    def of_experts(self, x_TC: Tensor, weight_TX: Tensor, expert_TX: Tensor) -> Tensor:
        """The sum of the outputs of the experts with these indices and weights."""
        if self.stacked is not None and len(x_TC) <= GROUPED_TOKENS:
            experts_mlp = load("experts").experts_mlp
            grouped_TC: Tensor = experts_mlp(x_TC, weight_TX, expert_TX, *self.stacked)
            return grouped_TC
        expert_P = expert_TX.reshape(-1)
        order_P = torch.argsort(expert_P, stable=True)
        counts_E = torch.bincount(expert_P, minlength=len(self.experts)).tolist()
        x_PC = x_TC.index_select(0, order_P // self.num_chosen)
        if self.routing.weighs_inputs:
            x_PC = x_PC * weight_TX.reshape(-1, 1).index_select(0, order_P)
            weight_TX = torch.ones_like(weight_TX)
        parts = zip(self.experts, torch.split(x_PC, counts_E), strict=True)
        y_PC = torch.cat([expert(part) for expert, part in parts if len(part)])
        unsorted_PC = torch.empty_like(y_PC).index_copy_(0, order_P, y_PC)
        y_TXC = unsorted_PC.view(*weight_TX.shape, -1)
        return (y_TXC * weight_TX.unsqueeze(-1)).sum(dim=1)

    def route(self, x_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Weights_TX (in the dtype of x) and indices_TX of each token's experts, the best first."""
        logits_TE = self.router(x_TC).float()
        is_sigmoid = self.routing.scoring == "sigmoid"
        scores_TE = torch.sigmoid(logits_TE) if is_sigmoid else torch.softmax(logits_TE, dim=-1)
        ranks_TE = scores_TE if self.correction_E is None else scores_TE + self.correction_E
        if self.routing.num_groups > 1:
            ranks_TE = self._limit_to_groups(ranks_TE)
        expert_TX = torch.topk(ranks_TE, self.num_chosen, dim=-1).indices
        weight_TX = scores_TE.gather(1, expert_TX)
        if self.norm_topk:
            weight_TX = weight_TX / weight_TX.sum(dim=-1, keepdim=True)
        if self.routing.scale != 1.0:
            weight_TX = weight_TX * self.routing.scale
        return weight_TX.to(x_TC.dtype), expert_TX

    def _limit_to_groups(self, ranks_TE: Tensor) -> Tensor:
        """The ranks, minus infinity outside of each token's best groups."""
        routing = self.routing
        ranks_TGE = ranks_TE.view(len(ranks_TE), routing.num_groups, -1)
        num_best = 2 if routing.scoring == "sigmoid" else 1
        of_groups_TG = ranks_TGE.topk(num_best, dim=-1).values.sum(dim=-1)
        kept_TX = of_groups_TG.topk(routing.groups_per_token, dim=-1).indices
        is_out_TG = torch.ones_like(of_groups_TG, dtype=torch.bool).scatter_(1, kept_TX, False)
        return ranks_TGE.masked_fill(is_out_TG.unsqueeze(-1), float("-inf")).view_as(ranks_TE)


class SharedExpertMlp:
    """Routed experts and one that every token passes through, scaled by `scale` of its input."""

    __slots__ = ("routed", "router", "scale", "shared")

    def __init__(self, routed: MoeMlp, shared: GatedMlp, router: Linear | None) -> None:
        self.routed, self.shared, self.router = routed, shared, router
        self.scale: Callable[[Tensor, Tensor], Tensor] = unscaled if router is None else self._scale

    def __call__(self, x_TC: Tensor) -> Tensor:
        return self.routed(x_TC) + self.scale(self.shared(x_TC), x_TC)

    def _scale(self, y_TC: Tensor, x_TC: Tensor) -> Tensor:
        assert self.router is not None
        return y_TC * torch.sigmoid(self.router(x_TC))


class NormedExperts(MoeMlp):
    """Experts of a state that they normalise, and the router by another norm (Gemma 4).

    `scale_E` multiplies the weights of the chosen experts.
    """

    __slots__ = ("norm", "router_norm", "scale_E")

    def __init__(
        self,
        spec: MlpSpec,
        router: Linear,
        experts: Sequence[GatedMlp],
        norms: tuple[Norm, Norm],
        scale_E: Tensor,
    ) -> None:
        super().__init__(spec, router, experts)
        (self.router_norm, self.norm), self.scale_E = norms, scale_E

    def compute(self, x_TC: Tensor) -> Tensor:
        weight_TX, expert_TX = self.route(self.router_norm(x_TC))
        weight_TX = weight_TX * self.scale_E[expert_TX]
        return self.of_experts(self.norm(x_TC), weight_TX, expert_TX)


class SeparateMlps(SharedExpertMlp):
    """A dense MLP and experts, each between norms of its kind (Gemma 4)."""

    __slots__ = ("after_routed", "after_shared", "before_shared")

    def __init__(
        self,
        routed: NormedExperts,
        shared: GatedMlp,
        around_shared: tuple[Norm, Norm],
        after_routed: Norm,
    ) -> None:
        super().__init__(routed, shared, None)
        self.before_shared, self.after_shared = around_shared
        self.after_routed = after_routed

    def __call__(self, x_TC: Tensor) -> Tensor:
        shared_TC = self.after_shared(self.shared(self.before_shared(x_TC)))
        return shared_TC + self.after_routed(self.routed(x_TC))


def unscaled(y_TC: Tensor, x_TC: Tensor) -> Tensor:
    """The shared expert's output as it is."""
    return y_TC


def routed_experts(blocks: Iterable[Block]) -> list[MoeMlp]:
    """The expert layers of a decoder's blocks, those next to a shared expert too."""
    mlps = (block.mlp for block in blocks)
    routed = (mlp.routed if isinstance(mlp, SharedExpertMlp) else mlp for mlp in mlps)
    return [mlp for mlp in routed if isinstance(mlp, MoeMlp)]
