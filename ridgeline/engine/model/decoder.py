"""One decoder for every family: what differs between models is in the spec, not in the code.

Input is a flattened batch: the step's tokens of all sequences one after another, each with its
position. Nothing here knows which token belongs to whom; only the attention of the step does.

Shape legend: T tokens of the step, S rows to be sampled, C hidden_size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.attention.base import Attend
from ridgeline.engine.model.layers import AttentionLayer, Norm
from ridgeline.engine.model.rope import RopeTables
from ridgeline.engine.quant.base import Linear
from ridgeline.spec.model import ModelSpec


class Block:
    """x + attention(norm(x)), then x + mlp(norm(x)); each branch's output may be normalised too."""

    __slots__ = ("attention", "attention_norm", "branch_norms", "mlp", "mlp_norm", "rope")

    def __init__(
        self,
        attention: AttentionLayer,
        mlp: Callable[[Tensor], Tensor],
        norms: tuple[Norm, Norm],
        branch_norms: tuple[Norm, Norm],
        rope: int,
    ) -> None:
        self.attention, self.mlp, self.rope = attention, mlp, rope
        self.attention_norm, self.mlp_norm = norms
        self.branch_norms = branch_norms

    def __call__(
        self,
        x_TC: Tensor,
        turns: Sequence[tuple[Tensor, Tensor]],
        attend: Attend,
        layer: int,
    ) -> Tensor:
        after_attention, after_mlp = self.branch_norms
        y_TC = self.attention(self.attention_norm(x_TC), turns[self.rope], attend, layer)
        x_TC = x_TC + after_attention(y_TC)
        return x_TC + after_mlp(self.mlp(self.mlp_norm(x_TC)))


class Decoder:
    """A model with its weights. Built by `ridgeline.engine.model.load.load_decoder`.

    `nbytes` is what the weights occupy in memory.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        embed_VC: Tensor,
        blocks: Sequence[Block],
        norm: Norm,
        lm_head: Linear,
        ropes: RopeTables,
        nbytes: int,
    ) -> None:
        self.spec, self.nbytes = spec, nbytes
        self.embed_VC, self.blocks, self.norm, self.lm_head = embed_VC, tuple(blocks), norm, lm_head
        self.ropes = ropes
        self.device, self.compute_dtype = embed_VC.device, embed_VC.dtype
        # Gemma rounds its scale to the dtype of the weights before multiplying.
        self.embed_scale = torch.tensor(spec.embed_scale, dtype=embed_VC.dtype).item()

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, end: int, attend: Attend) -> Tensor:
        """Normalised last hidden states x_TC; `end` is larger than every position."""
        x_TC = F.embedding(tokens_T, self.embed_VC)
        if self.embed_scale != 1.0:
            x_TC = x_TC * self.embed_scale
        turns = self.ropes.at(positions_T, end)
        for layer, block in enumerate(self.blocks):
            x_TC = block(x_TC, turns, attend, layer)
        return self.norm(x_TC)

    def logits(self, x_SC: Tensor) -> Tensor:
        """Float32 logits_SV of hidden states."""
        logits_SV = self.lm_head(x_SC).float()
        cap = self.spec.final_softcap
        return logits_SV if cap is None else torch.tanh(logits_SV / cap) * cap
