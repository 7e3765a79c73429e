"""Layers as a chain of torch operators: the reference, for any device and dtype.

When it loses: on the CPU every operator passes over memory and wakes the threads again, and a
decode step has hundreds of them (docs/concepts/kernels.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.attention.base import Attend
from ridgeline.engine.model.base import DecoderBody
from ridgeline.engine.model.shared_kv import StepMemory
from ridgeline.modelspec.format import Format
from ridgeline.modelspec.model import ModelSpec


class TorchForward:
    """Runs on every device and dtype."""

    def __init__(self, body: DecoderBody) -> None:
        self.body = body
        shares_kv = any(layer.attention.shares_kv for layer in body.spec.layers)
        self.remembers = shares_kv or body.inputs is not None

    @staticmethod
    def why_not(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
        return ()

    @staticmethod
    def storage_format(format: Format) -> Format:
        """Weights are kept as they are."""
        return format

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, end: int, attend: Attend) -> Tensor:
        body = self.body
        x_TC = body.table.rows(tokens_T).to(body.dtype)
        if body.embed_scale != 1.0:
            x_TC = x_TC * body.embed_scale
        rotations = body.ropes.at(positions_T, end)
        if self.remembers:
            attend = self._memory(tokens_T, x_TC, attend)
        if body.streams is not None:
            x_TC = body.streams.spread(x_TC)
        for layer, block in enumerate(body.blocks):
            x_TC = block(x_TC, rotations, attend, layer)
        if body.streams is not None:
            x_TC = body.streams.join(x_TC)
        return body.norm(x_TC)

    def _memory(self, tokens_T: Tensor, x_TC: Tensor, attend: Attend) -> StepMemory:
        inputs, layer = self.body.inputs, self.body.spec.layers[0].layer_input
        if inputs is None or layer is None:
            return StepMemory(attend)
        return StepMemory(attend, inputs(tokens_T, x_TC, layer.vocab_size))
