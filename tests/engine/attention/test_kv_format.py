"""Codes of the INT8 cache at the edges between two of them, where one rounding too many shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ridgeline.engine.attention.kv_format import MAX_CODE, OFFSET, Int8Kv, kv_format, read_tiles


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


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize(("tiles", "more"), [(1, 0), (2, 0), (0, 4)])
def test_layers_within_larger_blocks_hold_what_layers_alone_hold(
    name: str, tiles: int, more: int
) -> None:
    """Between two blocks of the layer lie whole tiles of another one, or a part of a tile."""
    num_blocks, num_heads, size, head_dim = 5, 3, 4, 12
    kv = kv_format(name)
    tile = (2, num_heads, size, kv.width(head_dim))
    alone_N2KBW = torch.zeros((num_blocks, *tile), dtype=kv.dtype)
    per_block = alone_N2KBW[0].numel()
    gap = tiles * tile[2] * tile[3] + more
    memory_NP = torch.zeros((num_blocks, per_block + gap), dtype=kv.dtype)
    part_N2KBW = memory_NP[:, gap:].view(num_blocks, *tile)
    places_R = torch.randperm(num_blocks * 2 * num_heads * size)[:60]
    rows_RW = kv.encode(torch.randn(60, head_dim))
    for layer in (alone_N2KBW, part_N2KBW):
        kv.write(layer, places_R, rows_RW)
    assert torch.equal(part_N2KBW, alone_N2KBW)
    tiles_R = torch.randint(num_blocks * 2 * num_heads, (17,))
    expected_RBW = alone_N2KBW.view(-1, *tile[2:])[tiles_R]
    assert torch.equal(read_tiles(part_N2KBW, tiles_R), expected_RBW)
    assert torch.equal(read_tiles(alone_N2KBW, tiles_R), expected_RBW)
