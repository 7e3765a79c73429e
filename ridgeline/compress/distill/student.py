"""A dense model whose layers are trained: one parameter per product, the tables stay as they are.

The embeddings, the LM head, norms and biases are not trained: they are the parts that a pruned
model shares with its teacher.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.compress.training_model import TrainableSource
from ridgeline.engine.checkpoints.load import DecoderBuilder
from ridgeline.engine.checkpoints.packed import packed_name
from ridgeline.engine.checkpoints.sources import PlainWeights, WeightSource
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.engine.quant.base import Linear
from ridgeline.modelspec.model import LinearSpec, ModelSpec


class TrainedLinear:
    """y = x Wᵀ + b with W in training."""

    __slots__ = ("bias_O", "weight_OI")

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.weight_OI, self.bias_O = weight_OI.requires_grad_(True), bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        return F.linear(x_TI, self.weight_OI, self.bias_O)

    @property
    def nbytes(self) -> int:
        return self.weight_OI.nbytes


class StudentModelBuilder(DecoderBuilder):
    """Builds blocks whose linears are trained, except routers.

    `parameters` has them by product; `rows` says where a part's weight is.
    """

    def __init__(self, spec: ModelSpec, weights: WeightSource) -> None:
        super().__init__(spec, TrainableSource(weights), torch.device("cpu"), torch.float32)
        self.parameters: dict[str, Tensor] = {}
        self.rows: dict[Part, tuple[str, slice]] = {}

    def _linear(
        self, keys: list[str], specs: list[LinearSpec], layer: int | None, expert: int | None = None
    ) -> Linear:
        if layer is None or "router" in keys[0]:
            return super()._linear(keys, specs, layer, expert)
        name, begin, weights, biases = packed_name(keys, layer, expert), 0, [], []
        for key, spec in zip(keys, specs, strict=True):
            part = Part(key, (spec.num_out, spec.num_in), layer, expert)
            weights.append(self.weights.get(part).float())
            self.rows[part] = name, slice(begin, begin + spec.num_out)
            begin += spec.num_out
            if spec.bias:
                biases.append(self._tensor(f"{key}.bias", (spec.num_out,), layer, expert).float())
        linear = TrainedLinear(torch.cat(weights), torch.cat(biases) if biases else None)
        self.parameters[name] = linear.weight_OI
        return linear


class StudentWeights(PlainWeights):
    """The weights of a student as they are now, layered over those that it does not train."""

    def __init__(self, builder: StudentModelBuilder, source: WeightSource) -> None:
        self._builder, self._source = builder, source

    def get(self, part: Part) -> Tensor:
        at = self._builder.rows.get(part)
        if at is None:
            return self._source.get(part)
        name, rows = at
        return self._builder.parameters[name].detach()[rows]
