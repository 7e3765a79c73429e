"""Activations in several digits: how exact they are, and the same bits however they are batched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
import torch

import ridgeline._native as _native
from ridgeline.config.settings import Settings
from ridgeline.engine.kernels.native_int8 import pack as pack_int8
from ridgeline.engine.kernels.native_linear import (
    ISA_VARIABLE,
    NativeLinear,
    Packed,
    pack_lines,
    quantise_rows,
)
from ridgeline.engine.quant import build_linear
from ridgeline.engine.quant.blocks import Blocks
from ridgeline.engine.quant.blocks import pack as pack_blocks
from ridgeline.engine.quant.int4.linear import pack as pack_int4
from ridgeline.engine.quant.int4.quantise import quantise as quantise_int4
from ridgeline.engine.quant.int8.quantise import quantise as quantise_int8
from ridgeline.engine.quant.packed import take_digits
from ridgeline.errors import BadInput, CannotRun
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost.operators import operator_work
from ridgeline.modelspec.format import DIGITS, INT4, blocks, dense
from ridgeline.modelspec.model import LinearSpec
from ridgeline.modelspec.rewrite import apply_quantization, linears, with_activations

ISAS = _native.linear_isas().split(",")
KINDS = ["int4", "int4, zeros", "int8", "groups of 16", "minima", "steps, minima"]
MOST = {"int4": 120, "int8": 127, "int8_groups": 127}  # native/linear/linear.h, most_value


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def in_blocks(kind: str, num_out: int, num_in: int) -> Blocks:
    """Whole numbers in groups of 16 or 32; with minima; with steps in spans of 128."""
    group, span = (16, 0) if kind == "groups of 16" else (32, 128 if "steps" in kind else 0)
    groups, spans = -(-num_in // group), -(-num_in // (span or group))
    q_OI = torch.randint(-128, 128, (num_out, num_in), dtype=torch.int8)
    found = Blocks(
        blocks(8, group, mins="minima" in kind, span=span), q_OI, torch.rand(num_out, spans).half()
    )
    if "minima" in kind:
        found = replace(found, min_OS=torch.randn(num_out, spans).half())
    if span:
        step_OG, min_step_OG = torch.randint(-32, 32, (2, num_out, groups), dtype=torch.int8)
        found = replace(found, step_OG=step_OG, min_step_OG=min_step_OG)
    return found


def made(kind: str, num_out: int, num_in: int) -> Packed:
    weight_OI = torch.randn(num_out, num_in)
    if kind.startswith("int4"):
        return pack_int4(quantise_int4(weight_OI, 32, zeros="zeros" in kind), 32)
    if kind == "int8":
        return pack_int8(*quantise_int8(weight_OI, "full"))
    return pack_blocks(in_blocks(kind, num_out, num_in))


def taking(
    packed: Packed, digits: int, isa: str, bias_O: torch.Tensor | None = None
) -> NativeLinear:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ISA_VARIABLE, isa)
        linear = NativeLinear(packed, bias_O)
    linear.digits = digits
    return linear


def left(x_TI: torch.Tensor, linear: NativeLinear) -> torch.Tensor:
    """The most that the digits leave of each number: a share of its group's largest."""
    group = linear.group
    parts = torch.nn.functional.pad(x_TI, (0, -x_TI.shape[1] % group)).view(len(x_TI), -1, group)
    top = parts.abs().amax(2, keepdim=True).double().expand(parts.shape)
    share = (2.0 * MOST[linear.packed.kind]) ** -linear.digits
    return (top * share).reshape(len(x_TI), -1)[:, : x_TI.shape[1]]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_rounding_error_is_within_the_bound_of_the_digits(kind: str, isa: str) -> None:
    packed, bias_O = made(kind, 50, 768), torch.randn(50)
    for digits in (1, 2, 3):
        linear = taking(packed, digits, isa, bias_O)
        weight_OI = linear.rows(torch.arange(50)).double()
        lows_OI = (
            16 * 32 if "steps" in kind else 4 if kind == "minima" else 0
        )  # added, then taken off
        for num_rows in (1, 3, 5, 20, 130):
            x_TI = torch.randn(num_rows, 768) * torch.logspace(-3, 3, num_rows).unsqueeze(1)
            exact = x_TI.double() @ weight_OI.T + bias_O
            added = x_TI.abs().double() @ (weight_OI.abs() + lows_OI).T + bias_O.abs()
            slack = 1.001 * left(x_TI, linear) @ weight_OI.abs().T + 1e-6 * added
            assert ((linear(x_TI) - exact).abs() <= slack).all(), (digits, num_rows)


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_significant_are_as_exact_as_float_products(kind: str) -> None:
    """Nearer to the exact product than torch's of the same weights in float32."""
    packed, x_TI = made(kind, 300, 2000), torch.randn(40, 2000)
    linear = taking(packed, DIGITS["float32"], "auto")
    weight_OI = linear.rows(torch.arange(300))
    exact = x_TI.double() @ weight_OI.double().T
    theirs = (x_TI @ weight_OI.T - exact).norm() / exact.norm()
    ours = (linear(x_TI) - exact).norm() / exact.norm()
    assert ours < max(theirs, 2e-7)


@pytest.mark.slow
@pytest.mark.parametrize("digits", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_on_every_isa_in_any_batch_and_on_any_threads(kind: str, digits: int) -> None:
    packed, bias_O, x_TI = made(kind, 2050, 515), torch.randn(2050), torch.randn(131, 515)
    x_TI[5] *= 1e4
    truth_TO = taking(packed, digits, ISAS[0], bias_O)(x_TI)
    for isa in ISAS:
        linear = taking(packed, digits, isa, bias_O)
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for rows in (slice(None), slice(0, 1), slice(5, 7), slice(3, 19), slice(130, 131)):
                assert torch.equal(linear(x_TI[rows]), truth_TO[rows]), (isa, rows)


@pytest.mark.parametrize("isa", ISAS)
def test_rows_of_zeros_and_of_very_large_and_small_numbers(isa: str) -> None:
    linear = taking(made("int4", 40, 200), 3, isa)
    weight_OI = linear.rows(torch.arange(40)).double()
    x_TI = torch.randn(4, 200) * torch.tensor([0.0, 1e30, 1e-20, 1.0]).unsqueeze(1)
    x_TI[3, 7] = 1e6  # makes the rest of its group relatively small, but not the other groups
    y_TO, exact = linear(x_TI), x_TI.double() @ weight_OI.T
    assert (y_TO[0] == 0).all() and y_TO.isfinite().all()
    slack = 1.001 * left(x_TI, linear) @ weight_OI.abs().T
    assert ((y_TO - exact).abs() <= slack + 1e-6 * x_TI.abs().double() @ weight_OI.abs().T).all()


def test_unsupported_digits_are_refused() -> None:
    whole = taking(made("int4", 32, 64), 2, "auto")
    for digits in (0, 4):
        with pytest.raises(ValueError, match="one to three digits"):
            whole.digits = digits
    floats = NativeLinear(Packed("fp32", 8, 40, 0, pack_lines("fp32", torch.randn(8, 40), 0)))
    with pytest.raises(ValueError, match="rows of floats"):
        floats.digits = 2
    with pytest.raises(ValueError, match="quantise their rows themselves"):
        whole.multiply_quantised(quantise_rows(torch.randn(3, 64), "int4", whole.group))
    fixed = taking(made("int8", 32, 64), 2, "auto")
    with pytest.raises(ValueError, match="one digit"):
        fixed(torch.randn(3, 64), row_scale=0.1)
    spec = LinearSpec(num_out=8, num_in=40, format=dense("float32"))
    plain = build_linear(spec, torch.randn(8, 40), None, torch.device("cpu"), torch.float32)
    take_digits(plain, 1)
    with pytest.raises(CannotRun, match="by the native kernels only"):
        take_digits(plain, 2)


def test_spec_states_activation_digits_and_counts_their_operations() -> None:
    plain = apply_quantization(load_spec("demo"), "int4")
    exact = with_activations(plain, "float32")
    for path, linear in linears(exact).items():
        whole = linear.format.kind == "int4"
        assert linear.format.digits == (3 if whole else 1), path
        assert linear.format.stored == linears(plain)[path].format
        assert linear.nbytes == linears(plain)[path].nbytes
    before, after = (operator_work(spec, [(5, 0)], 1) for spec in (plain, exact))
    assert after["down"].flops == 3 * before["down"].flops
    assert after["lm_head"] == before["lm_head"] and after["down"].rate == before["down"].rate
    assert exact.rewrites[-1] == "activations -> float32: asked for"
    with pytest.raises(CannotRun, match="needs integer weights"):
        with_activations(load_spec("demo"), "int16")
    with pytest.raises(BadInput, match="unknown activations"):
        with_activations(plain, "int4")
    assert INT4.stored is INT4
    assert set(DIGITS) == set(get_args(get_type_hints(Settings)["activations"]))
