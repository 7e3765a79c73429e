"""Layers as a chain of torch operators: the plain reading of the model, on any device and dtype.

When it loses: on the CPU every operator is a pass over memory and wakes the threads anew, and a
decode step is hundreds of them (docs/concepts/kernels.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.attention.base import Attend
from ridgeline.engine.model.base import DecoderBody
from ridgeline.modelspec.format import Format
from ridgeline.modelspec.model import ModelSpec


class TorchForward:
    """See the module's head."""

    def __init__(self, body: DecoderBody) -> None:
        self.body = body

    @staticmethod
    def why_not(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
        return ()

    @staticmethod
    def storage_format(format: Format) -> Format:
        """Weights stay as they are."""
        return format

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, end: int, attend: Attend) -> Tensor:
        body = self.body
        x_TC = body.table.rows(tokens_T).to(body.dtype)
        if body.embed_scale != 1.0:
            x_TC = x_TC * body.embed_scale
        turns = body.ropes.at(positions_T, end)
        for layer, block in enumerate(body.blocks):
            x_TC = block(x_TC, turns, attend, layer)
        return body.norm(x_TC)
