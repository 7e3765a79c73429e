"""2:4 sparse linears in 16 bits, for the sparse tensor cores of NVIDIA GPUs.

What. Of four adjacent inputs of an output at most two weights are not zero (`ridgeline prune
--sparsity 2:4`). The two are stored in 16 bits with their places, which is 9/16 of the dense
weight's bytes. On CUDA torch's semi-structured path multiplies them (cuSPARSELt where torch has it,
else CUTLASS): half of the weight bytes per step, and up to twice the dense arithmetic rate.

Invariant. Nothing is rounded or dropped: a weight with more than two of four is refused, so that
outputs differ from the dense weight's by the order of sums alone.

When it loses. Pruning to 2:4 costs more quality than INT4, which reads half as many bytes. Anywhere
but on CUDA with compute capability 8.0 this is the reference: the weight is widened for each
product, which is slower than the dense one.

Sources. Mishra et al. 2021, "Accelerating Sparse Deep Neural Networks" (arXiv 2104.08378); torch's
`torch.sparse.to_sparse_semi_structured`.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.errors import BadInput, CannotRun
from ridgeline.modelspec.model import LinearSpec

ROWS, COLUMNS = 32, 64
"""Outputs and inputs that torch stores together in 16 bits (CUTLASS; cuSPARSELt takes 16, 16)."""
LEAST_CAPABILITY = (8, 0)


def stored_mask(weight_OI: Tensor) -> Tensor:
    """Which two of every four inputs are stored: those of largest magnitude, the first of equals.

    Raises BadInput if the number of inputs is no multiple of four, or if more than two of four
    adjacent weights are not zero.
    """
    num_out, num_in = weight_OI.shape
    if num_in % 4:
        raise BadInput("2:4 sparsity needs groups of four inputs", value=f"{num_in} inputs")
    groups_OG4 = weight_OI.abs().view(num_out, -1, 4)
    if int((groups_OG4 > 0).sum(-1).amax()) > 2:
        raise BadInput("more than two of four adjacent weights are not zero")
    kept_OG2 = torch.argsort(groups_OG4, dim=-1, descending=True, stable=True)[..., :2]
    mask_OG4 = torch.zeros_like(groups_OG4, dtype=torch.bool)
    return mask_OG4.scatter_(-1, kept_OG2, True).view(num_out, num_in)


class Sparse24Linear:
    """y_TO = W x_TI (+ bias_O) of a 2:4 sparse weight."""

    __slots__ = ("bias_O", "meta", "packed", "sparse")

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.bias_O = bias_O
        self.sparse: Any = None
        self.packed = self.meta = torch.empty(0)
        if weight_OI.is_cuda:
            self.sparse = torch.sparse.to_sparse_semi_structured(weight_OI)
        else:
            self.packed, self.meta = _conversions().sparse_semi_structured_from_dense_cutlass(
                weight_OI
            )

    @staticmethod
    def build(
        spec: LinearSpec,
        weight_ON: Tensor,
        bias_O: Tensor | None,
        device: torch.device,
        compute_dtype: torch.dtype,
    ) -> Sparse24Linear:
        """Raises CannotRun for another dtype, an unfit shape, or a weight that is not sparse so."""
        if reason := why_not((spec.num_out, spec.num_in), device, compute_dtype):
            raise CannotRun(f"a weight cannot be stored 2:4: {reason}", value=spec.format.kind)
        weight_OI = weight_ON.to(device=device, dtype=compute_dtype).contiguous()
        try:
            stored_mask(weight_OI)
        except BadInput as error:
            raise CannotRun(
                "--quantization sparse-24 stores weights that are 2:4 sparse already",
                value=str(error),
                fix="prune the model first: ridgeline prune MODEL --sparsity 2:4",
            ) from None
        bias = None if bias_O is None else bias_O.to(device=device, dtype=compute_dtype)
        return Sparse24Linear(weight_OI, bias)

    @staticmethod
    def describe(spec: LinearSpec, device: torch.device) -> str:
        """How this linear will be computed on this machine, and why."""
        weights = "2:4 sparse 16-bit weights"
        if device.type == "cuda":
            return f"{weights}, by torch's semi-structured products"
        return f"{weights}, widened for each product: slower than dense without sparse tensor cores"

    def widen(self) -> Tensor:
        """The dense weight, [O, I]."""
        if self.sparse is not None:
            dense_OI: Tensor = self.sparse.to_dense()
            return dense_OI
        wide_OI: Tensor = _conversions().sparse_semi_structured_to_dense_cutlass(
            self.packed, self.meta
        )
        return wide_OI

    def __call__(self, x_TI: Tensor) -> Tensor:
        if self.sparse is None or not len(x_TI):
            return F.linear(x_TI, self.widen(), self.bias_O)
        return F.linear(x_TI, self.sparse, self.bias_O).contiguous()

    @property
    def nbytes(self) -> int:
        kept = [self.packed, self.meta, self.bias_O]
        if self.sparse is not None:  # cuSPARSELt keeps the places behind the values
            kept += [self.sparse.packed, self.sparse.meta]
        return sum(tensor.nbytes for tensor in kept if tensor is not None)


def why_not(shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> str:
    """Why torch cannot store a weight of this shape and dtype there; "" if it can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its products are in 16 bits, not {str(dtype).removeprefix('torch.')}"
    if shape[0] % ROWS or shape[1] % COLUMNS:
        return f"[{shape[0]}, {shape[1]}] is no multiple of [{ROWS}, {COLUMNS}]"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return "this GPU has no sparse tensor cores (compute capability 8.0)"
    return ""


def _conversions() -> Any:
    """torch's conversions, which run on every device; only the products need CUDA."""
    from torch.sparse import _semi_structured_conversions

    return _semi_structured_conversions
