"""Codes of the INT8 cache at the edges between two of them, where one rounding too many shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ridgeline.engine.attention.kv_format import MAX_CODE, OFFSET, Int8Kv


@pytest.mark.parametrize("seed", range(4))
def test_codes_are_values_times_the_rounded_reciprocal_scale(seed: int) -> None:
    """127 / max, rounded once, as the native store computes it; then the product, half to even."""
    rng = np.random.default_rng(seed)
    top_R = rng.uniform(1e-3, 100, 400).astype(np.float32)
    inverse_R = np.float32(MAX_CODE) / top_R
    edges_E = np.arange(-126, 127, dtype=np.float32) + np.float32(0.5)
    near_RE = (edges_E / inverse_R[:, None]).astype(np.float32)
    x_RD = np.concatenate([top_R[:, None], near_RE, np.nextafter(near_RE, np.float32(0))], axis=1)
    codes_RD = np.rint(x_RD * inverse_R[:, None]).astype(np.int32)
    found_RW = Int8Kv().encode(torch.from_numpy(x_RD))
    found_RD = found_RW[:, : x_RD.shape[1]].view(torch.uint8).int().numpy() - OFFSET
    assert np.array_equal(found_RD, codes_RD)
