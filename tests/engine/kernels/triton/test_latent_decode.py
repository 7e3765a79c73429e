"""Decode over latent rows in Triton against the absorbed form in float64."""

from __future__ import annotations

import pytest
import torch

from tests.engine.kernels.triton.interpreter import DEVICE

pytestmark = pytest.mark.slow
LENGTHS = [1, 16, 0, 45]


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("num_heads", "rank", "rope"), [(4, 64, 16), (20, 40, 8), (70, 32, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_latent_decode(
    num_heads: int, rank: int, rope: int, dtype: torch.dtype, splits: int
) -> None:
    from ridgeline.engine.kernels.triton.latent import latent_decode

    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(12, 1, 1, 16, rank + rope, generator=generator).to(dtype)
    tables = torch.stack([torch.randperm(12, generator=generator)[:3] for _ in LENGTHS]).int()
    lens = torch.tensor(LENGTHS, dtype=torch.int32)
    q = torch.randn(len(LENGTHS), num_heads, rank + rope, generator=generator)
    got = latent_decode(
        *(tensor.to(DEVICE) for tensor in (q, kv, tables, lens)),
        rank=rank,
        scale=0.1,
        max_context=48,
        splits=splits,
    )
    for row, length in enumerate(LENGTHS):
        rows = kv[tables[row].long()].float().flatten(0, 3)[:length].double()
        weights = torch.softmax(q[row].double() @ rows.T * 0.1, dim=-1)
        want = (weights @ rows[:, :rank]).float()
        torch.testing.assert_close(got[row].cpu(), want, atol=1e-5, rtol=1e-5)
