"""Tables of cosines and sines: equal to `ridgeline.modelspec.rope`, position by position."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace

from ridgeline.engine.model.rope import (
    RopeTables,
    angles,
    rotate_,
    rotate_and_scale_queries_,
    rotate_interleaved_,
)
from ridgeline.modelspec.model import RopeSpec
from ridgeline.modelspec.rope import attention_factor, inv_freq

KINDS = [
    RopeSpec(dim=8, theta=500.0),
    RopeSpec(dim=8, theta=500.0, kind="linear", factor=2.5),
    RopeSpec(dim=8, theta=500.0, kind="dynamic", factor=3.0, original_max_positions=20),
    RopeSpec(dim=8, theta=500.0, kind="llama3", factor=8.0, original_max_positions=32),
    RopeSpec(dim=8, theta=500.0, kind="yarn", factor=4.0, original_max_positions=32),
]
LONGROPE = RopeSpec(
    dim=4,
    theta=500.0,
    kind="longrope",
    factor=4.0,
    original_max_positions=32,
    short_factor=(1.0, 1.2),
    long_factor=(2.0, 3.0),
)


@pytest.mark.parametrize("rope", KINDS, ids=lambda rope: rope.kind)
def test_angles_follow_the_definition(rope: RopeSpec) -> None:
    got = angles(rope, 64, context=64)
    for position in range(64):
        want = torch.tensor(inv_freq(rope, position + 1)) * position
        torch.testing.assert_close(got[position], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("context", "factors"), [(32, "short_factor"), (33, "long_factor")])
def test_longrope_is_chosen_by_the_engines_context(context: int, factors: str) -> None:
    first, second = getattr(LONGROPE, factors)[:2]
    want = torch.tensor([1.0 / first, 500**-0.5 / second])
    torch.testing.assert_close(angles(LONGROPE, 8, context)[3], 3 * want)


def test_tables_grow_and_keep_their_values() -> None:
    tables = RopeTables([*KINDS, LONGROPE], 5000, torch.float32, torch.device("cpu"))
    positions = torch.tensor([0, 19, 20, 1000])
    before = tables.at(positions, 1001)
    after = tables.at(torch.cat((positions, torch.tensor([4321]))), 4322)
    for (cos, sin), (cos2, sin2) in zip(before, after, strict=True):
        assert torch.equal(cos, cos2[:4]) and torch.equal(sin, sin2[:4])
    cos, _ = after[-1]
    assert float(cos[0].max()) == pytest.approx(attention_factor(LONGROPE))


def test_partial_rotation_leaves_the_other_dimensions_unchanged() -> None:
    """Dimensions (i, i + R/2) turn by position · frequency; beyond R nothing moves."""
    rope = RopeSpec(dim=4, theta=100.0)
    tables = RopeTables([rope], 64, torch.float32, torch.device("cpu"))
    x_THD = torch.randn(2, 3, 6)
    turned = x_THD.clone()
    rotate_(turned, *tables.at(torch.tensor([5, 11]), 12)[0])
    for row, position in enumerate((5, 11)):
        for pair, frequency in enumerate(inv_freq(rope)):
            angle = position * frequency
            a, b = x_THD[row, :, pair], x_THD[row, :, pair + 2]
            torch.testing.assert_close(
                turned[row, :, pair], a * math.cos(angle) - b * math.sin(angle)
            )
            torch.testing.assert_close(
                turned[row, :, pair + 2], b * math.cos(angle) + a * math.sin(angle)
            )
    assert torch.equal(turned[..., 4:], x_THD[..., 4:])


@pytest.mark.parametrize("rotate", [rotate_, rotate_interleaved_])
@pytest.mark.parametrize("offset", [0, 1])
def test_queries_are_scaled_by_position_after_the_rotation(
    rotate: Callable[..., None], offset: int
) -> None:
    plain = RopeSpec(dim=4, theta=100.0, interleaved=rotate is rotate_interleaved_)
    scaled = replace(plain, query_floor=3, query_offset=offset, query_scale=0.5)
    tables = RopeTables([plain, scaled], 10, torch.float32, torch.device("cpu"))
    (cos, sin), (cos2, sin2) = tables.at(torch.arange(10), 10)
    expected = torch.randn(10, 5, 6, generator=torch.Generator().manual_seed(1))
    got = expected.clone()
    rotate(expected, cos, sin)
    for position in range(10):
        expected[position, :3] *= 1 + 0.5 * math.log(1 + (position + offset) // 3)
    rotate_and_scale_queries_(rotate, 3, got, cos2, sin2)
    torch.testing.assert_close(got, expected)
