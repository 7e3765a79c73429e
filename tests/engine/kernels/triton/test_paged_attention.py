"""Paged attention in Triton against the float64 definition, on random caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.kernels.triton.interpreter import DEVICE
from tests.engine.kernels.triton.paged_cases import PagedCase, expected, make_case

pytestmark = pytest.mark.slow
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
CONTEXTS = [(1, 1), (16, 1), (17, 1), (70, 1)]
MIXED = [(40, 3), (1, 1), (33, 17), (16, 16), (20, 1)]
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"window": 7},
    "window-1": {"window": 1},
    "chunk": {"chunk": 16},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks_H": [-1.0, 0.5, 4.0, 60.0]},
    "window-cap-sinks": {"window": 20, "softcap": 3.0, "sinks_H": [0.0, 1.0, 2.0, 3.0]},
}


def kind_of(name: str) -> dict[str, Any]:
    kind = dict(KINDS[name])
    if "sinks_H" in kind:
        kind["sinks_H"] = torch.tensor(kind["sinks_H"], device=DEVICE)
    return kind


def check_decode(case: PagedCase, splits: int | None = None, **kind: Any) -> None:
    from ridgeline.engine.kernels.triton.attention import paged_decode

    scale = 1.3 * case.q_THD.shape[-1] ** -0.5
    got = paged_decode(
        case.q_THD,
        case.kv_N2KBW,
        case.tables_SM,
        case.lens_S,
        scale=scale,
        max_context=case.tables_SM.shape[1] * case.kv_N2KBW.shape[3],
        splits=splits,
        **kind,
    )
    assert_near(got, expected(case, scale, **kind))


def check_prefill(case: PagedCase, tile: Any = None, **kind: Any) -> None:
    from ridgeline.engine.kernels.triton.attention import paged_prefill

    scale = 1.3 * case.q_THD.shape[-1] ** -0.5
    got = paged_prefill(
        case.q_THD,
        case.kv_N2KBW,
        case.tables_SM,
        case.starts_S1,
        case.lens_S,
        scale=scale,
        max_queries=max(case.num_new),
        tile=tile,
        **kind,
    )
    assert_near(got, expected(case, scale, **kind))


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    limit = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.cpu().float(), want, atol=limit, rtol=limit)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("splits", [1, 4])
def test_decode_sees_its_own_keys(kind: str, splits: int) -> None:
    check_decode(make_case(CONTEXTS), splits, **kind_of(kind))


def test_decode_long_contexts_take_several_keys_per_split() -> None:
    """Splits whose keys do not fill them, and some without keys."""
    check_decode(make_case([(300, 1), (129, 1), (5, 1)], heads=(2, 1)), splits=8)


@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (8, 1), (7, 1), (20, 1)])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_decode_head_shapes(heads: tuple[int, int], head_dim: int) -> None:
    check_decode(make_case([(33, 1), (2, 1)], heads=heads, head_dim=head_dim), splits=1)


@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_decode_block_sizes(block_size: int) -> None:
    shapes = [(block_size, 1), (2 * block_size + 1, 1)]
    check_decode(make_case(shapes, block_size=block_size), splits=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("kv_dtype", "scaled"),
    [(None, False), (torch.float8_e4m3fn, False), (torch.float8_e4m3fn, True), (torch.int8, True)],
    ids=["plain", "fp8", "fp8-scaled", "int8"],
)
def test_formats(dtype: torch.dtype, kv_dtype: torch.dtype | None, scaled: bool) -> None:
    """Blocks of a layer lie within larger ones, as where layers have two shapes."""
    shapes = [(40, 1), (16, 1)]
    case = make_case(shapes, dtype=dtype, kv_dtype=kv_dtype, scaled=scaled, gap=24)
    check_decode(case, splits=2)
    case = make_case([(40, 5)], dtype=dtype, kv_dtype=kv_dtype, scaled=scaled, gap=24)
    check_prefill(case)


def test_padded_rows_are_zero() -> None:
    case = make_case([(0, 1), (9, 1)])
    check_decode(case, splits=1)
    check_decode(case, splits=4)
    check_decode(case, splits=4, sinks_H=torch.ones(4, device=DEVICE))


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_sees_no_later_key(kind: str) -> None:
    check_prefill(make_case(MIXED), **kind_of(kind))


@pytest.mark.parametrize(("heads", "head_dim"), [((8, 1), 64), ((7, 1), 80), ((2, 2), 128)])
def test_prefill_head_shapes(heads: tuple[int, int], head_dim: int) -> None:
    check_prefill(make_case([(25, 9), (3, 3)], heads=heads, head_dim=head_dim))


def test_prefill_of_several_tiles_skips_the_mask_where_all_rows_see_the_keys() -> None:
    from ridgeline.engine.kernels.triton.tiles import AttentionTile

    check_prefill(make_case([(90, 40), (2, 2)]), AttentionTile(32, 16, 4, 1))


def test_prefill_leaves_rows_after_the_last_query() -> None:
    from ridgeline.engine.kernels.triton.attention import paged_prefill

    case = make_case([(20, 4), (5, 0)])
    q = torch.cat((case.q_THD, case.q_THD))
    out = torch.full_like(q, 7.0)
    arguments = (case.kv_N2KBW, case.tables_SM, case.starts_S1, case.lens_S)
    paged_prefill(q, *arguments, scale=0.1, max_queries=4, out=out)
    assert_near(out[:4], expected(case, 0.1))
    assert (out[4:] == 7.0).all()


def test_decode_of_strided_queries() -> None:
    from ridgeline.engine.kernels.triton.attention import paged_decode

    case = make_case([(20, 1), (5, 1)])
    wide = torch.cat((case.q_THD, torch.full_like(case.q_THD, 9.0)), 1)
    q_SHD = wide[:, : case.q_THD.shape[1]]
    got = paged_decode(q_SHD, case.kv_N2KBW, case.tables_SM, case.lens_S, scale=0.1, max_context=64)
    assert_near(got, expected(case, 0.1))
