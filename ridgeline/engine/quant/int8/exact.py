"""Verifies that a kernel is exact on this machine: random and extreme inputs against integer
arithmetic.

Shape suffixes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ridgeline.engine.quant.int8.base import LARGEST, Gemm, GemmKind
from ridgeline.engine.quant.int8.quantise import WeightRange, quantise
from ridgeline.engine.quant.int8.reference import ReferenceGemm

_MOST_OUTPUTS = 64  # of the layer's own: the check must stay far below the time of loading it
_ROUNDING = 4e-7  # float32, of an exact sum


def error_of(
    kind: type[GemmKind], weight_range: WeightRange, device: torch.device, num_out: int, num_in: int
) -> str | None:
    """None if every product is exact, else the first deviation."""
    num_out = min(num_out, _MOST_OUTPUTS)
    for name, weight_OI in _weights(num_out, num_in):
        q_OI, _ = quantise(weight_OI.to(device), weight_range)
        scale_O = torch.ones(num_out, device=device)
        try:
            gemm = kind.pack(q_OI, scale_O)
            wrong = _first_wrong(gemm, ReferenceGemm(q_OI, scale_O), _inputs(q_OI))
        except RuntimeError as error:  # torch: "not implemented", "could not create a primitive"
            return f"fails with {str(error).splitlines()[0]!r}"
        if wrong:
            return f"wrong with {weight_range} {name} weights and {wrong}"
    return None


def _weights(num_out: int, num_in: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(num_out * 31 + num_in)
    yield "normal", torch.randn(num_out, num_in, generator=generator)
    sign_O1 = torch.where(torch.arange(num_out) % 2 == 0, 1.0, -1.0).unsqueeze(1)
    yield "constant", sign_O1.expand(num_out, num_in)
    share_OI = torch.rand(num_out, num_in, generator=generator)
    share_OI[:, 1::2] = 1 - share_OI[:, : num_in // 2 * 2 : 2]
    yield "pairwise extreme", sign_O1 * share_OI  # pairs sum to the largest value there is


def _inputs(q_OI: Tensor) -> Iterator[tuple[str, Tensor]]:
    device, num_in = q_OI.device, q_OI.shape[1]
    generator = torch.Generator().manual_seed(num_in)
    for num_rows in (1, 5):
        x_TI = torch.randint(-LARGEST, LARGEST + 1, (num_rows, num_in), generator=generator)
        x_TI[:, -1] = LARGEST  # the row's scale is then 1: what comes out are whole numbers
        yield f"{num_rows} random rows", x_TI.float().to(device)
    for value in (LARGEST, -LARGEST):
        yield f"all inputs {value}", torch.full((2, num_in), float(value), device=device)
    yield "inputs that follow the weights' signs", q_OI[:3].sign().float() * LARGEST


def _first_wrong(gemm: Gemm, oracle: Gemm, inputs: Iterator[tuple[str, Tensor]]) -> str | None:
    for name, x_TI in inputs:
        y_TO, expected_TO = gemm(x_TI), oracle(x_TI)
        if not torch.allclose(y_TO, expected_TO, rtol=_ROUNDING, atol=0):
            worst = (y_TO - expected_TO).abs().max() / expected_TO.abs().max()
            return f"{name} (off by {worst.item():.2g} of the largest)"
    return None
