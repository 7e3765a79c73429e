"""Taylor importance: how the loss would change if a channel or a head were scaled down.

A gate of 1 stands before every input of W_down and W_o; the importance of an input is the square of
the loss's slope in its gate, summed over calibration windows (Molchanov et al., CVPR 2019, arXiv
1906.10771; for heads Michel et al., NeurIPS 2019, arXiv 1905.10650). A KV head's gate scales all of
its query heads, so their slopes are added before they are squared.

The whole model is held in memory with the activations of one window, unlike in every other part of
pruning.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.compress.training_model import TrainableSource, TrainingModel
from ridgeline.engine.checkpoints.load import DecoderBuilder
from ridgeline.engine.checkpoints.sources import WeightSource
from ridgeline.engine.quant.base import Linear
from ridgeline.errors import CannotRun
from ridgeline.modelspec.cost import resident_weight_bytes
from ridgeline.modelspec.model import LinearSpec, ModelSpec

Scores = dict[tuple[str, int], Tensor]
"""("down", layer): by channel; ("o", layer): by KV head."""


class GatedLinear:
    """A linear whose inputs are multiplied by gates that take part in training."""

    __slots__ = ("gate_I", "linear")

    def __init__(self, linear: Linear, num_in: int) -> None:
        self.linear, self.gate_I = linear, torch.ones(num_in, requires_grad=True)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.linear(x_TI * self.gate_I)

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes


class GateBuilder(DecoderBuilder):
    """Builds blocks with gates before W_down and W_o."""

    def __init__(self, spec: ModelSpec, weights: WeightSource) -> None:
        super().__init__(spec, TrainableSource(weights), torch.device("cpu"), torch.float32)
        self.gates: dict[tuple[str, int], GatedLinear] = {}

    def _linear(
        self, keys: list[str], specs: list[LinearSpec], layer: int | None, expert: int | None = None
    ) -> Linear:
        linear = super()._linear(keys, specs, layer, expert)
        if keys[0] not in ("o", "down") or layer is None or expert is not None:
            return linear
        gated = self.gates[keys[0], layer] = GatedLinear(linear, specs[0].num_in)
        return gated


def taylor_scores(
    spec: ModelSpec, source: WeightSource, windows: Sequence[Sequence[int]]
) -> Scores:
    """The importance of every channel and KV head. Raises CannotRun if memory cannot hold the
    model.
    """
    needed = 2 * resident_weight_bytes(spec)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise CannotRun(
            "Taylor importance holds the whole model",
            value=f"{needed / 1e9:.1f} GB",
            limit=f"{there / 1e9:.1f} GB of memory",
            fix="use --importance wanda",
        )
    with torch.inference_mode(False), torch.enable_grad():
        builder = GateBuilder(spec, source)
        model = TrainingModel(builder, len(windows[0]))
        scores: Scores = {}
        for tokens in windows:
            logprobs_TV = model(tokens)
            F.nll_loss(logprobs_TV[:-1], torch.tensor(tokens[1:])).backward()
            for (key, layer), gated in builder.gates.items():
                slope = gated.gate_I.grad
                assert slope is not None
                if key == "o":
                    heads = spec.layers[layer].attention.num_kv_heads
                    slope = slope.view(heads, -1).sum(-1)
                square = slope.square()
                scores[key, layer] = scores.get((key, layer), 0) + square
                gated.gate_I.grad = None
    return scores
