"""Products with quantised weights in Triton against dense float64 products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.engine.quant.int4.quantise import quantise as quantise_int4
from ridgeline.engine.quant.int8.quantise import quantise as quantise_int8
from tests.engine.kernels.triton.interpreter import DEVICE

pytestmark = pytest.mark.slow
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_product(got: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None) -> None:
    """Errors relative to the size of a row's result."""
    want = x.cpu().double() @ w.double().T
    want = want if bias is None else want + bias.cpu().double()
    assert got.shape == want.shape
    error = (got.cpu().double() - want).norm(dim=1) / want.norm(dim=1)
    assert float(error.max()) < TOLERANCE[got.dtype], error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
def test_int4(dtype: torch.dtype, zeros: bool, group_size: int) -> None:
    from ridgeline.engine.kernels.triton.linear import pack_int4, w4a16

    weights = quantise_int4(random(70, 512) * 0.1, group_size, zeros=zeros, shrinks=(1.0,))
    x = random(3, 512, seed=1).to(dtype).to(DEVICE)
    scale_OG = (weights.scale_OG.float() * weights.factor_O.unsqueeze(1)).to(DEVICE)
    zero_OG = None if weights.zero_OG is None else weights.zero_OG.to(DEVICE)
    got = w4a16(x, pack_int4(weights.q_OI).to(DEVICE), scale_OG, zero_OG, group_size=group_size)
    assert_product(got, x, weights.dense(group_size))


@pytest.mark.parametrize("num_rows", [65, 130, 160])
def test_int4_of_more_rows_than_a_tile(num_rows: int) -> None:
    from ridgeline.engine.quant.int4 import unpacked

    weights = quantise_int4(random(40, 256) * 0.1, 64, zeros=True, shrinks=(1.0,))
    linear = unpacked.UnpackedInt4(weights, 64, None, torch.float32)
    x = random(num_rows, 256, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpacked.UnpackedInt4, "streams", staticmethod(lambda *_: True))
        patch.setattr(unpacked.UnpackedInt4, "widen", lambda _: pytest.fail("widened"))
        for name in ("packed_OJ", "scale_OG", "zero_OG"):
            setattr(linear, name, getattr(linear, name).to(DEVICE))
        got = linear(x.to(DEVICE))
    assert_product(got, x.to(DEVICE), weights.dense(64))


def test_int4_streams_up_to_a_number_of_rows_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from ridgeline.engine.quant.int4 import unpacked

    monkeypatch.setattr(unpacked, "why_not", lambda _: None)
    streams, gpu = unpacked.UnpackedInt4.streams, torch.device("cuda")
    assert [streams(rows, gpu) for rows in (0, 1, 65, 160, 161)] == [False, True, True, True, False]
    assert not streams(1, torch.device("cpu"))


def test_int4_inputs_that_do_not_fill_the_last_block() -> None:
    from ridgeline.engine.kernels.triton.linear import pack_int4, w4a16

    weights = quantise_int4(random(64, 160) * 0.1, 32, zeros=True, shrinks=(1.0,))
    assert weights.zero_OG is not None
    x = random(2, 160, seed=1).to(DEVICE)
    tables = (weights.scale_OG.float() * weights.factor_O.unsqueeze(1), weights.zero_OG)
    scale_OG, zero_OG = (table.to(DEVICE) for table in tables)
    got = w4a16(x, pack_int4(weights.q_OI).to(DEVICE), scale_OG, zero_OG, group_size=32)
    assert_product(got, x, weights.dense(32))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bits(kind: str, dtype: torch.dtype) -> None:
    from ridgeline.engine.kernels.triton.linear import w8a16

    weight, bias = random(130, 200), random(130, seed=2)
    x = random(5, 200, seed=1).to(dtype).to(DEVICE)
    if kind == "int8":
        q_OI, scale_O = quantise_int8(weight, "full")
    else:
        scale_O = weight.abs().amax(1) / 448
        q_OI = (weight / scale_O.unsqueeze(1)).to(torch.float8_e4m3fn)
    got = w8a16(x, q_OI.to(DEVICE), scale_O.to(DEVICE), bias.to(DEVICE))
    assert_product(got, x, q_OI.float() * scale_O.unsqueeze(1), bias)


@pytest.mark.parametrize("num_rows", [1, 16, 17, 70])
def test_float_weights_of_any_number_of_rows(num_rows: int) -> None:
    from ridgeline.engine.kernels.triton.linear import w16a16

    x, w = random(num_rows, 72), random(40, 72, seed=1)
    assert_product(w16a16(x.to(DEVICE), w.to(DEVICE)), x, w)


def test_parts_of_the_inputs_are_added_once_in_every_launch() -> None:
    """Three splits of which the last is short, twice: counters are zero again."""
    from ridgeline.engine.kernels.triton.linear import SkinnyTile, _counters, w16a16

    x, w = random(2, 600), random(70, 600, seed=1)
    tile = SkinnyTile(rows=16, inputs=128, splits=3)
    first, second = (w16a16(x.to(DEVICE), w.to(DEVICE), tile=tile) for _ in range(2))
    assert_product(first, x, w)
    assert torch.equal(first, second)
    assert not _counters(x.to(DEVICE).device).any()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("num_rows", [1, 20])
def test_codes_times_codes(kind: Any, num_rows: int) -> None:
    from ridgeline.engine.kernels.triton.linear import w8a8
    from ridgeline.engine.kernels.triton.norm import quantise_rows

    x, weight = random(num_rows, 560).to(DEVICE), random(70, 560, seed=1).to(DEVICE)
    bias = random(70, seed=2).to(DEVICE)
    (p_TI, scale_T1), (q_OI, scale_O1) = quantise_rows(x, kind), quantise_rows(weight, kind)
    got = w8a8(p_TI, scale_T1, q_OI, scale_O1.squeeze(1), bias, out_dtype=torch.float32)
    rows, weights = p_TI.float() * scale_T1, (q_OI.float() * scale_O1).cpu()
    assert_product(got, rows, weights, bias)


def test_nibbles_are_unpacked_as_they_were() -> None:
    from ridgeline.engine.kernels.triton.linear import pack_int4, unpack_int4

    q_OI = torch.randint(16, (5, 200), dtype=torch.uint8)
    assert torch.equal(unpack_int4(pack_int4(q_OI), 200), q_OI)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "num_in"), [(1, 512), (3, 208), (66, 256)])
def test_nvfp4(dtype: torch.dtype, num_rows: int, num_in: int) -> None:
    from ridgeline.engine.kernels.triton.linear import pack_int4, w4a16_nvfp4
    from ridgeline.engine.quant.nvfp4 import quantise

    weights = quantise(random(70, num_in, seed=num_in) * 0.1)
    x, bias = random(num_rows, num_in, seed=1).to(dtype).to(DEVICE), random(70, seed=2).to(dtype)
    packed, scale = pack_int4(weights.code_OI), weights.scale_OG
    tensors = (tensor.to(DEVICE) for tensor in (packed, scale, weights.global_1, bias))
    assert_product(w4a16_nvfp4(x, *tensors), x, weights.dense(), bias)


def test_nvfp4_scales_of_every_byte_are_those_of_torch() -> None:
    """One input of 1 per output: the product is the weight itself."""
    from ridgeline.engine.kernels.triton.linear import pack_int4, w4a16_nvfp4
    from ridgeline.engine.quant.nvfp4 import Nvfp4Weights

    scale = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).unsqueeze(1)
    codes = (torch.arange(127 * 16) % 16).to(torch.uint8).view(127, 16)
    weights = Nvfp4Weights(codes, scale, torch.tensor([0.37]))
    packed = pack_int4(codes).to(DEVICE)
    got = w4a16_nvfp4(torch.eye(16).to(DEVICE), packed, scale.to(DEVICE), torch.ones(1).to(DEVICE))
    assert torch.equal(got.cpu().T, weights._replace(global_1=torch.ones(1)).dense())
