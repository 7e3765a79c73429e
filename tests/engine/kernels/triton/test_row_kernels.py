"""Norms, activations, rotation and the store of keys in Triton, against torch operators."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.model.rope import rotate_, rotate_interleaved_
from tests.engine.kernels.triton.interpreter import DEVICE
from tests.engine.kernels.triton.paged_cases import encode_rows

pytestmark = pytest.mark.slow
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def assert_near(got: Tensor, want: Tensor) -> None:
    limit = TOLERANCE[got.dtype]
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, atol=limit, rtol=limit)


def assert_same_codes(got: tuple[Tensor, Tensor], x_TC: Tensor) -> None:
    """Codes as torch rounds them, but for numbers within rounding of the middle of two."""
    codes, scale_T1 = got
    largest = 127.0 if codes.dtype == torch.int8 else 448.0
    want_T1 = x_TC.float().abs().amax(1, keepdim=True) / largest
    want_T1 = torch.where(want_T1 == 0, 1 / largest, want_T1)
    torch.testing.assert_close(scale_T1, want_T1, rtol=1e-5, atol=0)
    error = (codes.float() - x_TC.float() / scale_T1).abs()
    step = 1.0 if codes.dtype == torch.int8 else (x_TC.float() / scale_T1).abs() / 8 + 2**-9
    assert (error <= 0.5 * step * 1.001 + 1e-5).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 100, 576])
def test_rms_norm(dtype: torch.dtype, width: int) -> None:
    from ridgeline.engine.kernels.triton.norm import add_rms_norm, rms_norm

    x, y, gain = (random(5, width, dtype=dtype, seed=seed) for seed in range(3))
    gain = gain[0]
    assert_near(
        rms_norm(x, gain, 1e-5), F.rms_norm(x.float(), (width,), gain.float(), 1e-5).to(dtype)
    )
    total, normed = add_rms_norm(x, y, gain, 1e-5)
    assert torch.equal(total, x + y)
    assert_near(normed, F.rms_norm((x + y).float(), (width,), gain.float(), 1e-5).to(dtype))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_norm_with_codes(kind: str) -> None:
    from ridgeline.engine.kernels.triton import norm

    x, y = random(4, 100), random(4, 100, seed=1)
    x[2] = y[2] = 0
    gain = random(100, seed=2)
    normed = F.rms_norm(x, (100,), gain, 1e-5)
    assert_same_codes(norm.rms_norm_q(x, gain, 1e-5, kind), normed)
    total, *codes = norm.add_rms_norm_q(x, y, gain, 1e-5, kind)
    assert torch.equal(total, x + y)
    assert_same_codes((codes[0], codes[1]), F.rms_norm(total, (100,), gain, 1e-5))
    assert_same_codes(norm.quantise_rows(x, kind), x)


def test_int8_codes_round_half_to_even() -> None:
    from ridgeline.engine.kernels.triton.norm import quantise_rows

    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 3.0]], device=DEVICE)
    codes, _ = quantise_rows(x, "int8")
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, -126, 3]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    from ridgeline.engine.kernels.triton import norm

    x = random(3, 2 * 1100, dtype=dtype)
    gate, up = x.float().chunk(2, dim=1)
    want = F.silu(gate) * up
    assert_near(norm.silu_mul(x), want.to(dtype))
    assert_same_codes(norm.silu_mul_q(x, "fp8"), want)
    assert_same_codes(norm.silu_mul_q(x, "int8"), want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_sums_are_scaled_by_row_and_output(dtype: torch.dtype) -> None:
    from ridgeline.engine.kernels.triton.norm import scaled_rows

    sums, scale_T1, scale_O, bias = (random(*s) for s in ((3, 1100), (3, 1), (1100,), (1100,)))
    sums = (sums * 100).to(dtype)
    want = sums * scale_T1 * scale_O
    assert_near(scaled_rows(sums, scale_T1, scale_O, None, torch.float32), want)
    got = scaled_rows(sums, scale_T1, scale_O, bias, torch.bfloat16)
    assert_near(got, (want + bias).bfloat16())


def test_no_rows() -> None:
    from ridgeline.engine.kernels.triton import norm

    x, gain = random(0, 64), random(64)
    assert norm.rms_norm(x, gain, 1e-5).shape == (0, 64)
    assert norm.silu_mul(x).shape == (0, 32)


def make_cache(
    num_kv_heads: int, block_size: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """An empty layer of 4 blocks, and slots of five rows, one of them not stored."""
    kv = torch.zeros(4, 2, num_kv_heads, block_size, width, device=DEVICE).to(dtype)
    slots = torch.tensor([3 * block_size + 1, 0, -1, block_size - 1, 2 * block_size], device=DEVICE)
    return kv, slots


def read_rows(kv: Tensor, slots: Tensor, head_dim: int) -> Tensor:
    """kv_T2KW of the slots: numbers, or codes."""
    block_size = kv.shape[3]
    codes = kv.flatten(3)[..., : block_size * head_dim].unflatten(3, (block_size, head_dim))
    return codes[slots // block_size, :, :, slots % block_size]


@pytest.mark.parametrize(
    ("head_dim", "rotated", "interleaved"),
    [(64, 64, False), (80, 80, False), (96, 48, False), (64, 64, True), (64, 32, True)],
)
def test_rope_and_store(head_dim: int, rotated: int, interleaved: bool) -> None:
    from ridgeline.engine.kernels.triton.rope_store import rope_store

    num_heads, num_kv_heads = 5, 2
    qkv = random(5, num_heads + 2 * num_kv_heads, head_dim)
    angle = random(5, rotated // 2, seed=1)
    cos = torch.cat((angle.cos(), angle.cos()), 1)
    sin = torch.cat((-angle.sin(), angle.sin()), 1)
    kv, slots = make_cache(num_kv_heads, 8, head_dim, torch.float32)
    want = qkv.clone()
    rotate = rotate_interleaved_ if interleaved else rotate_
    rotate(want[:, : num_heads + num_kv_heads], cos.unsqueeze(1), sin.unsqueeze(1))
    before = kv.clone()
    rope_store(
        *(qkv, cos, sin, kv, slots),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        interleaved=interleaved,
    )
    assert_near(qkv, want)
    stored = slots >= 0
    rows = read_rows(kv, slots[stored], head_dim)
    assert torch.equal(rows, qkv[stored, num_heads:].unflatten(1, (2, num_kv_heads)))
    at = slots[stored]
    kv[at // 8, :, :, at % 8] = 0
    assert torch.equal(kv, before)


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_store_in_formats(dtype: torch.dtype, head_dim: int) -> None:
    from ridgeline.engine.kernels.triton.rope_store import store_kv

    scaled = dtype == torch.int8
    kv, slots = make_cache(2, 16, head_dim + 4 * scaled, dtype)
    wide = random(5, 7, head_dim) * 200
    kv_T2KD = wide[:, 3:].unflatten(1, (2, 2))
    store_kv(kv_T2KD, kv, slots)
    stored = slots >= 0
    got = read_rows(kv, slots[stored], head_dim).float()
    want = kv_T2KD[stored]
    if scaled:
        scale_N2KB = kv.view(torch.float32).flatten(3)[..., 16 * head_dim // 4 :]
        at = slots[stored]
        scale_T2K1 = scale_N2KB[at // 16, :, :, at % 16].unsqueeze(-1)
        torch.testing.assert_close(scale_T2K1, want.abs().amax(-1, keepdim=True) / 127)
        assert ((got * scale_T2K1 - want).abs() <= 0.501 * scale_T2K1).all()
        codes, _ = encode_rows(want, torch.int8)
        assert codes.shape[-1] == 2 * (head_dim + 4)
    elif dtype == torch.float8_e4m3fn:
        assert torch.equal(got, want.clamp(-448, 448).to(dtype).float())
    else:
        assert torch.equal(got, want.to(dtype).float())


def test_stored_keys_are_those_that_attention_reads() -> None:
    """`store_kv`, then a decode step over the rows of one sequence, in int8."""
    from ridgeline.engine.kernels.triton.attention import paged_decode
    from ridgeline.engine.kernels.triton.rope_store import store_kv

    kv = torch.zeros(3, 2, 2, 16, 68, dtype=torch.int8, device=DEVICE)
    rows = random(20, 2, 2, 64)
    tables = torch.tensor([[2, 0, 0]], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([*range(32, 48), *range(4)], device=DEVICE)
    store_kv(rows, kv, slots)
    q = random(1, 4, 64, seed=3)
    lens = torch.tensor([20], dtype=torch.int32, device=DEVICE)
    got = paged_decode(q, kv, tables, lens, scale=0.125, max_context=48)
    k, v = (rows[:, side].repeat_interleave(2, 1).transpose(0, 1) for side in (0, 1))
    want = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, scale=0.125).transpose(0, 1)
    torch.testing.assert_close(got, want, atol=0.03, rtol=0.03)
