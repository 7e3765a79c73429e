"""Integers in small groups, with scales of scales and minima: the content of GGUF's blocks.

  w[o, i] = q[o, i] · scale + minimum        of the group of 16 to 128 inputs that contains i

4 or 8 bits per weight, laid out as in `native/linear/linear.h`. A group's scale (and minimum) is an
fp16 number, or an fp16 number shared by a span of groups times an 8-bit step, as in llama.cpp's
K-quants. 4 bits are 0 to 15 with a minimum and -8 to 7 without.

Invariant: the weights are the file's, bit for bit; only activations are rounded, to 8 bits with a
scale per row and group. A row's result is bitwise the same in any batch, on any number of threads
and every ISA.

When it loses: 2, 3, 5 and 6 bits occupy 8 here. Many rows pay for small groups: each group ends
with multiplications by its scale and minimum.

Shape suffixes: O outputs, I inputs, G groups, S spans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.engine.kernels.native_linear import Kind, Packed, in_panels, pack_lines
from ridgeline.engine.quant.packed import PackedLinear, needs_cpu
from ridgeline.modelspec.format import Format, blocks, blocks_of_all
from ridgeline.modelspec.model import LinearSpec


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight in blocks.

    `q_OI` is uint8 0..15 (`format.bits` 4) or int8; `scale_OS` fp16, one per span if `format.span`,
    else per group; `step_OG` int8 with a span; the minima likewise.
    """

    format: Format
    q_OI: Tensor
    scale_OS: Tensor
    step_OG: Tensor | None = None
    min_OS: Tensor | None = None
    min_step_OG: Tensor | None = None

    @property
    def group(self) -> int:
        assert self.format.group_size is not None
        return self.format.group_size

    def rows(self, reorder: Callable[[Tensor], Tensor]) -> Blocks:
        """Every table with its rows (outputs) reordered."""
        optional = (self.step_OG, self.min_OS, self.min_step_OG)
        return Blocks(
            self.format,
            reorder(self.q_OI),
            reorder(self.scale_OS),
            *(None if table is None else reorder(table) for table in optional),
        )

    def dense(self) -> Tensor:
        """The weights, float32 [O, I]: the slow reference of the kernels' numbers."""
        q_OI = self.q_OI.float()
        if self.format.bits == 4 and not self.format.mins:
            q_OI = q_OI - 8
        return q_OI * self._per_input(self.scale_OS, self.step_OG) + self.lows()

    def lows(self) -> Tensor:
        """Each weight's minimum, [O, I]; zeros if there are none."""
        if self.min_OS is None:
            return torch.zeros(self.q_OI.shape)
        return self._per_input(self.min_OS, self.min_step_OG)

    def _per_input(self, value_OS: Tensor, step_OG: Tensor | None) -> Tensor:
        span = self.format.span or self.group
        value_OG = value_OS.float().repeat_interleave(span // self.group, 1)
        value_OG = value_OG if step_OG is None else value_OG * step_OG.float()
        return value_OG.repeat_interleave(self.group, 1)

    def within(self, format: Format) -> Blocks:
        """The same weights in the layout `format`, which contains this one (`blocks_of_all`)."""
        if format == self.format:
            return self
        assert format.group_size is not None
        span, to_span = self.format.span or self.group, format.span or format.group_size
        per_group, per_span = self.group // format.group_size, span // to_span
        q_OI = self.q_OI
        if format.bits == 8 and self.format.bits == 4:
            q_OI = (q_OI.to(torch.int8) - (0 if self.format.mins else 8)).to(torch.int8)

        def steps(own_OG: Tensor | None) -> Tensor:
            if own_OG is not None:
                return own_OG.repeat_interleave(per_group, 1)
            shape = (q_OI.shape[0], q_OI.shape[1] // (format.group_size or 1))
            return torch.ones(shape, dtype=torch.int8)

        min_OS = self.min_OS
        if format.mins and min_OS is None:
            min_OS = torch.zeros_like(self.scale_OS)
        return Blocks(
            format,
            q_OI,
            self.scale_OS.repeat_interleave(per_span, 1),
            steps(self.step_OG) if format.span else None,
            None if min_OS is None else min_OS.repeat_interleave(per_span, 1),
            steps(self.min_step_OG) if format.span and format.mins else None,
        )


def merge_blocks(pieces: Sequence[Blocks]) -> Blocks:
    """Weights of the same inputs as one, outputs stacked, in a layout that contains all."""
    format = blocks_of_all([piece.format for piece in pieces])
    alike = [piece.within(format) for piece in pieces]

    def stacked(tables: Sequence[Tensor | None]) -> Tensor | None:
        present = [table for table in tables if table is not None]
        return torch.cat(present) if present else None

    return Blocks(
        format,
        torch.cat([piece.q_OI for piece in alike]),
        torch.cat([piece.scale_OS for piece in alike]),
        stacked([piece.step_OG for piece in alike]),
        stacked([piece.min_OS for piece in alike]),
        stacked([piece.min_step_OG for piece in alike]),
    )


def pack(weight: Blocks) -> Packed:
    """In the kernels' layout; nothing is rounded."""
    num_out, num_in = weight.q_OI.shape
    kind: Kind = "int4" if weight.format.bits == 4 else "int8_groups"

    def panels(table: Tensor | None) -> Tensor | None:
        return None if table is None else in_panels(table)

    return Packed(
        kind,
        num_out,
        num_in,
        weight.group,
        pack_lines(kind, weight.q_OI, weight.group),
        panels(weight.scale_OS),
        factors=in_panels(torch.ones(num_out)),
        mins=panels(weight.min_OS),
        steps=panels(weight.step_OG),
        min_steps=panels(weight.min_step_OG),
        span=weight.format.span,
    )


def round_to(weight_OI: Tensor, group: int) -> Blocks:
    """Round to nearest, 8 bits, one scale per group, as Q8_0 does."""
    num_out, num_in = weight_OI.shape
    padded = torch.nn.functional.pad(weight_OI.float(), (0, -num_in % group))
    parts_OGI = padded.view(num_out, -1, group)
    scale_OG = (parts_OGI.abs().amax(2) / 127).clamp(min=2.0**-14).half()
    q_OGI = (parts_OGI / scale_OG.float().unsqueeze(2)).round().clamp(-127, 127)
    q_OI = q_OGI.to(torch.int8).view(num_out, -1)[:, :num_in].contiguous()
    return Blocks(blocks(8, group), q_OI, scale_OG)


class BlocksLinear:
    """Builds `PackedLinear`s of weights in blocks."""

    @staticmethod
    def build(
        spec: LinearSpec,
        weight_ON: Tensor,
        bias_O: Tensor | None,
        device: torch.device,
        compute_dtype: torch.dtype,
    ) -> PackedLinear:
        needs_cpu(spec, device)
        assert spec.format == blocks(8, spec.format.group_size or 0), "others come from files alone"
        rounded = round_to(weight_ON, spec.format.group_size or 0)
        return PackedLinear(pack(rounded), bias_O, compute_dtype)

    @staticmethod
    def describe(spec: LinearSpec, device: torch.device) -> str:
        """How this linear will be computed on this machine. Raises CannotRun."""
        needs_cpu(spec, device)
        format = spec.format
        return f"native: {format.bits:g} bits in groups of {format.group_size}, as in the file"
