"""A model under training: blocks that torch differentiates, over whole windows of text.

Shape suffixes: T tokens, C hidden_size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.attention.full import FullAttention
from ridgeline.engine.checkpoints.load import DecoderBuilder
from ridgeline.engine.checkpoints.sources import PlainWeights, WeightSource
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.engine.model.decoder import final_logits
from ridgeline.engine.model.layers import make_norm
from ridgeline.engine.model.rope import RopeTables


class TrainableSource(PlainWeights):
    """Another source's weights as tensors that may take part in training."""

    def __init__(self, inner: WeightSource) -> None:
        self._inner = inner

    def get(self, part: Part) -> Tensor:
        return self._inner.get(part).clone()


class TrainingModel:
    """A model for training whose blocks come from `builder`."""

    def __init__(self, builder: DecoderBuilder, length: int) -> None:
        spec = self._spec = builder.spec
        ropes = list(dict.fromkeys(layer.attention.rope for layer in spec.layers))
        self._embed_VC = builder.weights.get(Part("embed", (spec.vocab_size, spec.hidden_size)))
        self._embed_VC = self._embed_VC.float()
        self._blocks = [builder.block(layer, i, ropes) for i, layer in enumerate(spec.layers)]
        gain_C = builder.weights.get(Part("norm", (spec.hidden_size,)))
        self._norm = make_norm(spec, gain_C, torch.float32)
        self._head_VC = self._embed_VC
        if not spec.tied_embeddings:
            shape = (spec.lm_head.num_out, spec.lm_head.num_in)
            self._head_VC = builder.weights.get(Part("lm_head", shape)).float()
        self._attend = FullAttention(spec, length, self._embed_VC)
        tables = RopeTables(ropes, length, torch.float32, torch.device("cpu"))
        self._turns = tables.at(torch.arange(length), length)

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """Log-probabilities [T, V] of a window."""
        return torch.log_softmax(self.logits(tokens), -1)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits [T, V] of a window."""
        spec = self._spec
        x_TC = F.embedding(torch.tensor(tokens), self._embed_VC) * spec.embed_scale
        for index, block in enumerate(self._blocks):
            x_TC = block(x_TC, self._turns, self._attend, index)
        logits_TV = F.linear(self._norm(x_TC), self._head_VC)
        return final_logits(spec, logits_TV)
