"""LLM.int8 by bitsandbytes' rule, row by row, against the plain reading of that rule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ridgeline.engine.kernels.native_int8 import pack
from ridgeline.engine.kernels.native_linear import NativeLinear
from ridgeline.engine.quant import build_linear
from ridgeline.engine.quant.int8.quantise import quantise
from ridgeline.engine.quant.outlier_rows import OutlierRowsLinear, columns
from ridgeline.engine.quant.packed import PackedLinear
from ridgeline.engine.quant.ready import linear_of
from ridgeline.errors import CannotRun
from ridgeline.modelspec.format import Format
from ridgeline.modelspec.model import LinearSpec

THRESHOLD = 6.0


def by_the_rule(
    x_TI: torch.Tensor, q_OI: torch.Tensor, scale_O: torch.Tensor, bias_O: torch.Tensor
) -> torch.Tensor:
    """bitsandbytes for a batch of one, in float64: outliers out of the row and its scale; the rest
    in whole numbers; outliers times what the int8 weights mean."""
    rows = []
    for x_I in x_TI.double():
        loud = [i for i, value in enumerate(x_I.tolist()) if abs(value) >= THRESHOLD]
        rest_I = x_I.clone()
        rest_I[loud] = 0
        step = max(float(rest_I.abs().max()) / 127, 1e-30)
        y_O = ((rest_I / step).round() @ q_OI.double().T) * step * scale_O.double()
        for i in loud:
            y_O = y_O + x_I[i] * q_OI[:, i].double() * scale_O.double()
        rows.append(y_O + bias_O.double())
    return torch.stack(rows)


def case(num_rows: int) -> tuple[torch.Tensor, ...]:
    """Rows with different outliers, one without, and one with a value at the threshold."""
    torch.manual_seed(num_rows)
    x_TI = torch.randn(num_rows, 70).clamp(-5.5, 5.5)
    for t in range(1, num_rows):
        x_TI[t, torch.randint(0, 70, (t % 5,))] = 20.0 * (-1) ** t
    x_TI[-1, 69] = -THRESHOLD
    q_OI, scale_O = quantise(torch.randn(37, 70), "full")
    return x_TI, q_OI, scale_O, torch.randn(37)


def linear(q_OI: torch.Tensor, scale_O: torch.Tensor, bias_O: torch.Tensor) -> OutlierRowsLinear:
    found = linear_of(pack(q_OI, scale_O), bias_O, torch.float32, THRESHOLD)
    assert isinstance(found, OutlierRowsLinear)
    return found


@pytest.mark.parametrize("num_rows", [1, 2, 9, 33])
def test_products_match_the_reference(num_rows: int) -> None:
    x_TI, *weight = case(num_rows)
    given_TI = x_TI.clone()
    y_TO, wanted_TO = linear(*weight)(x_TI), by_the_rule(x_TI, *weight)
    assert (y_TO - wanted_TO).norm() < 1e-6 * wanted_TO.norm()
    assert torch.equal(x_TI, given_TI)
    plain_TO = linear_of(pack(*weight[:2]), weight[2], torch.float32)(x_TI)
    assert (
        plain_TO - wanted_TO
    ).norm() > 1e-3 * wanted_TO.norm()  # a different rule would give other results


def test_products_match_bitsandbytes() -> None:
    """Its own product of single rows (scripts/foreign_vectors.py), which it rounds to float16
    first."""
    found = load_file(Path(__file__).parents[1] / "checkpoints" / "vectors.safetensors")
    q_OI, scale_O, x_TI, y_TO = (
        found[f"bnb_int8_rows/{name}"] for name in ("weight", "SCB", "x", "y")
    )
    packed, bias_O = pack(q_OI, scale_O / 127), None
    ours_TO = linear_of(packed, bias_O, torch.float32, THRESHOLD)(x_TI)
    plain_TO = linear_of(packed, bias_O, torch.float32)(x_TI)
    for t in range(len(x_TI)):
        far, plain = ((each[t] - y_TO[t]).norm() / y_TO[t].norm() for each in (ours_TO, plain_TO))
        assert far < 1e-4, t
        assert (plain > 1e-3) == (t in (1, 2, 3)), (t, plain)


def test_row_does_not_depend_on_its_batch() -> None:
    x_TI, *weight = case(33)
    product = linear(*weight)
    whole_TO = product(x_TI)
    assert torch.equal(torch.cat([product(x_TI[t : t + 1]) for t in range(33)]), whole_TO)
    assert torch.equal(product(x_TI.flip(0)).flip(0), whole_TO)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert torch.equal(product(x_TI), whole_TO)
    finally:
        torch.set_num_threads(threads)
    assert product(x_TI[:0]).shape == (0, 37)


def test_rows_without_outliers_are_plain_int8() -> None:
    x_TI, *weight = case(4)
    x_TI = x_TI.clamp(-5.9, 5.9)
    packed = pack(*weight[:2])
    plain = PackedLinear(packed, weight[2], torch.float32)
    assert torch.equal(linear(*weight)(x_TI), plain(x_TI))


def test_columns_equal_those_of_the_unpacked_rows() -> None:
    q_OI, scale_O = quantise(torch.randn(21, 45), "full")
    packed, chosen_W = pack(q_OI, scale_O), torch.tensor([0, 3, 4, 30, 44])
    rows_OI = NativeLinear(packed).rows(torch.arange(21))
    assert torch.equal(columns(packed, chosen_W), rows_OI[:, chosen_W])


def test_other_devices_and_dense_weights_are_refused() -> None:
    format = Format(kind="int8", bits=8, scale_bytes=4, threshold=THRESHOLD)
    spec = LinearSpec(num_out=4, num_in=8, format=format)
    with pytest.raises(CannotRun, match="on the CPU only"):
        build_linear(spec, torch.randn(4, 8), None, torch.device("cpu"), torch.float32)
