"""Layers as a chain of torch operators: the reference, for any device and dtype.

When it loses: on the CPU every operator passes over memory and wakes the threads again, and a
decode step has hundreds of them (docs/concepts/kernels.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.attention.base import Attend
from ridgeline.engine.model.base import DecoderBody
from ridgeline.modelspec.format import Format
from ridgeline.modelspec.model import ModelSpec


class TorchForward:
    """Runs on every device and dtype."""

    def __init__(self, body: DecoderBody) -> None:
        self.body = body

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
        for layer, block in enumerate(body.blocks):
            x_TC = block(x_TC, rotations, attend, layer)
        return body.norm(x_TC)
