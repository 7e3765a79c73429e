"""The INT8 linear of the registry: a verified kernel, a bias, and the caller's dtype.

Shape suffixes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.kernels.native_int8 import pack
from ridgeline.engine.quant.base import Linear
from ridgeline.engine.quant.int8.base import Gemm
from ridgeline.engine.quant.int8.choose import ChosenGemm, choose
from ridgeline.engine.quant.int8.quantise import quantise
from ridgeline.engine.quant.packed import PackedLinear
from ridgeline.engine.quant.scaled import ScaledLinear
from ridgeline.errors import CannotRun
from ridgeline.modelspec.model import LinearSpec


class Int8Linear:
    """y_TO = W x_TI (+ bias_O) in integer arithmetic."""

    __slots__ = ("_bias_O", "_dtype", "_gemm", "chosen", "nbytes", "num_out")

    def __init__(
        self,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        chosen: ChosenGemm,
        compute_dtype: torch.dtype,
    ) -> None:
        q_OI, scale_O = quantise(weight_OI, chosen.weight_range)
        self._gemm: Gemm = chosen.kind.pack(q_OI, scale_O)
        self._bias_O = None if bias_O is None else bias_O.float()
        self._dtype = compute_dtype
        self.chosen, self.num_out = chosen, len(q_OI)
        self.nbytes = q_OI.nbytes + scale_O.nbytes + (0 if bias_O is None else 4 * self.num_out)

    @staticmethod
    def build(
        spec: LinearSpec,
        weight_ON: Tensor,
        bias_O: Tensor | None,
        device: torch.device,
        compute_dtype: torch.dtype,
    ) -> Linear:
        if spec.format.group_size is not None or spec.format.bits != 8:
            raise CannotRun(
                "int8 linears have 8 bits and one scale per output row", value=spec.format
            )
        if spec.format.wide:
            raise CannotRun(
                "which inputs are kept apart is decided when a model is made, and run on the CPU",
                value=f"{spec.format.wide} inputs on {device}",
                fix="use --device cpu with what ridgeline quantize --method llm-int8 wrote",
            )
        if spec.format.threshold:
            raise CannotRun(
                "inputs beyond a threshold are multiplied as floats on the CPU only",
                value=f"{spec.format.threshold:g} on {device}",
                fix="use --device cpu",
            )
        chosen = choose(device, spec.num_out, spec.num_in)
        if device.type == "cuda":
            return ScaledLinear(weight_ON.to(device), bias_O, compute_dtype, "int8")
        bias_O = None if bias_O is None else bias_O.to(device)
        if chosen.name == "native":
            q_OI, scale_O = quantise(weight_ON, chosen.weight_range)
            return PackedLinear(pack(q_OI, scale_O), bias_O, compute_dtype)
        return Int8Linear(weight_ON.to(device), bias_O, chosen, compute_dtype)

    @staticmethod
    def describe(spec: LinearSpec, device: torch.device) -> str:
        """Which kernel will compute this linear on this machine, and why. Raises CannotRun.

        On CUDA, the exact product of many rows; few rows stream the weights.
        """
        return choose(device, spec.num_out, spec.num_in).reason

    def __call__(self, x_TI: Tensor) -> Tensor:
        if not len(x_TI):
            return x_TI.new_empty(0, self.num_out, dtype=self._dtype)
        y_TO = self._gemm(x_TI.float())
        if self._bias_O is not None:
            y_TO += self._bias_O
        return y_TO.to(self._dtype)
