"""Cuts weights in the kernels' layout between ranks, without repacking them.

A panel is 16 outputs, and its lines follow its inputs (native/linear/linear.h), so whole panels of
outputs and whole groups of inputs are ranges of memory.

Shape legend: O outputs, I inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ridgeline.engine.kernels import large_pages
from ridgeline.engine.kernels.native_linear import (
    BLOCK,
    PANEL,
    Kind,
    Packed,
    concatenate_outputs,
    row_group,
)
from ridgeline.errors import CannotRun
from ridgeline.modelspec.shard import Span

_LINE_BYTES = 64
_LINE_INPUTS: dict[Kind, int] = {"int4": 8, "int8": 4, "int8_groups": 4, "bf16": 2, "fp32": 1}


def cut_outputs(packed: Packed, spans: Sequence[Span]) -> Packed:
    """The outputs of all `spans`, one after the other."""
    pieces = []
    for span in spans:
        is_whole = span.stop % PANEL == 0 or (span is spans[-1] and span.stop == packed.num_out)
        _require(span.start % PANEL == 0 and is_whole, "outputs", span, PANEL)
        first, last = span.start // PANEL, -(-span.stop // PANEL)
        pieces.append(_panels(packed, first, last, len(span)))
    return concatenate_outputs(pieces)


def _panels(packed: Packed, first: int, last: int, num_out: int) -> Packed:
    per_panel = len(packed.lines) // -(-packed.num_out // PANEL)

    def cut(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[first:last].contiguous()

    factors = packed.factors
    return replace(
        packed,
        num_out=num_out,
        lines=large_pages.moved(packed.lines[first * per_panel : last * per_panel]),
        scales=cut(packed.scales),
        zeros=cut(packed.zeros),
        factors=None if factors is None else factors[first * PANEL : last * PANEL].contiguous(),
        mins=cut(packed.mins),
        steps=cut(packed.steps),
        min_steps=cut(packed.min_steps),
    )


def cut_inputs(packed: Packed, span: Span) -> Packed:
    """The inputs of `span` of a weight whose scales belong to groups, or that has none."""
    assert packed.kind != "int8", "the scale of a row of activations would change"
    group = row_group(packed.kind, packed.num_in, packed.group) if packed.group else BLOCK
    unit = math.lcm(BLOCK, packed.span or group)
    is_whole = span.stop % unit == 0 or span.stop == packed.num_in
    _require(span.start % unit == 0 and is_whole, "inputs", span, unit)
    panels, per_line = -(-packed.num_out // PANEL), _LINE_INPUTS[packed.kind]
    lines = packed.lines.view(panels, -1, _LINE_BYTES)
    stop = -(-span.stop // group) * group
    own = lines[:, span.start // per_line : stop // per_line].reshape(-1)

    def cut(values: Tensor | None, inputs: int) -> Tensor | None:
        if values is None:
            return None
        return values[:, span.start // inputs : -(-span.stop // inputs)].contiguous()

    return replace(
        packed,
        num_in=len(span),
        lines=large_pages.moved(own),
        scales=cut(packed.scales, packed.span or group),
        zeros=cut(packed.zeros, group),
        mins=cut(packed.mins, packed.span or group),
        steps=cut(packed.steps, group),
        min_steps=cut(packed.min_steps, group),
    )


def unpack_integers(packed: Packed) -> tuple[Tensor, Tensor]:
    """q_OI (int8) and scale_O of an INT8 weight with a scale per output."""
    assert packed.kind == "int8" and packed.factors is not None
    panels = -(-packed.num_out // PANEL)
    bytes_PLOJ = packed.lines.view(panels, -1, PANEL, 4).to(torch.int16) - 128
    q_OI = bytes_PLOJ.to(torch.int8).permute(0, 2, 1, 3).reshape(panels * PANEL, -1)
    return q_OI[: packed.num_out, : packed.num_in], packed.factors[: packed.num_out]


def _require(holds: bool, what: str, span: Span, unit: int) -> None:
    if not holds:
        raise CannotRun(
            f"tensor parallelism would cut packed weights within {unit} {what}",
            value=f"{what} {span.start} to {span.stop}",
            limit=f"multiples of {unit}",
            fix="use --pipeline-parallel-size, or the unquantised checkpoint",
        )
