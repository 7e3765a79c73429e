"""One decoder for every model family: models differ in their spec, not in code.

The input is a flattened batch: the step's tokens of all sequences one after another, each with its
position. Only the step's attention knows which token belongs to which sequence. Everything around
attention is one of `ridgeline.engine.execution.layers`.

Shape legend: T tokens of the step, S rows to be sampled, C hidden_size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.attention.base import Attend
from ridgeline.engine.model.base import DecoderBody, LayerForward
from ridgeline.engine.quant.base import Linear
from ridgeline.modelspec.model import ModelSpec


def final_logits(spec: ModelSpec, logits: Tensor) -> Tensor:
    """Logits of the LM head as the model scales and bounds them."""
    if spec.logit_scale != 1.0:
        logits = logits * spec.logit_scale
    cap = spec.final_softcap
    return logits if cap is None else torch.tanh(logits / cap) * cap


class Decoder:
    """A model with its weights, built by `ridgeline.engine.checkpoints.load.load_decoder`.

    `nbytes` is the memory of the weights. Rows of `table` may be narrower than `compute_dtype`.
    """

    def __init__(
        self, body: DecoderBody, forward: LayerForward, lm_head: Linear, nbytes: int
    ) -> None:
        self.spec, self.body, self.nbytes = body.spec, body, nbytes
        self.blocks, self.table, self.norm = body.blocks, body.table, body.norm
        self.forward, self.lm_head = forward, lm_head
        self.device, self.compute_dtype = body.table.device, body.dtype

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, end: int, attend: Attend) -> Tensor:
        """Normalised final hidden states x_TC; `end` is larger than every position."""
        return self.forward(tokens_T, positions_T, end, attend)

    def head(self, x_SC: Tensor) -> Tensor:
        """Logits_SV as the LM head computes them; float32 where the model scales or caps them."""
        logits_SV = self.lm_head(x_SC)
        if self.spec.logit_scale == 1.0 and self.spec.final_softcap is None:
            return logits_SV
        return final_logits(self.spec, logits_SV.float())

    def logits(self, x_SC: Tensor) -> Tensor:
        """Float32 logits_SV of hidden states x_SC."""
        return final_logits(self.spec, self.lm_head(x_SC).float())
