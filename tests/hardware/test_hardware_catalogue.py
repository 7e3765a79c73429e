"""The catalogue: every row sourced, dated and dense."""

from __future__ import annotations

import pytest

from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import _MOST_MEANT, find_accelerator, load_catalogue

ROW = """
[[accelerator]]
name = "x1"
vendor = "X"
kind = "gpu"
dense_tflops = { bfloat16 = 100 }
memory_gb = 16
bandwidth_tb_s = 1.5
source = "sheet"
as_of = "2026-08"
"""
PRICE = """
[[accelerator.price]]
usd_per_hour = 1.5
commitment = "spot"
provider = "P"
source = "list"
as_of = "2026-08-01"
"""


def test_a_good_row() -> None:
    x1 = load_catalogue(ROW + PRICE)["x1"]
    assert x1.peak("bfloat16") == x1.peak("float16") == 100e12
    assert (x1.memory_bytes, x1.bandwidth_bytes_s) == (16_000_000_000, 1.5e12)
    assert x1.prices[0].usd_per_hour == 1.5
    with pytest.raises(BadInput, match="float4"):
        x1.peak("float4")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (ROW.replace('source = "sheet"', ""), "no source"),
        (ROW.replace('"sheet"', '" "'), "no source"),
        (ROW.replace('as_of = "2026-08"', ""), "no valid date"),
        (ROW.replace("2026-08", "2026"), "no valid date"),
        (ROW.replace("2026-08", "2026-13"), "no valid date"),
        (ROW + "sparse = true", "sparsity"),
        (ROW.replace("16\n", "-16\n"), "out of range"),
        (ROW.replace("100 }", "0 }"), "out of range"),
        (ROW.replace("memory_gb", "memory_gib"), "memory_gib"),
        (ROW.replace("1.5\n", '"fast"\n'), "malformed"),
        (ROW + ROW, "same name"),
        (ROW + PRICE.replace('"list"', '""'), "no source"),
        (ROW + PRICE.replace("2026-08-01", "soon"), "no valid date"),
        (ROW + PRICE.replace("1.5", "nan"), "out of range"),
        ("x = [", "malformed"),
    ],
)
def test_bad_rows_are_refused(bad: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        load_catalogue(bad)


def test_the_catalogue_that_comes_with_ridgeline() -> None:
    rows = load_catalogue()
    assert len(rows) >= 30
    assert all(price.source for row in rows.values() for price in row.prices)
    assert {
        "h100-sxm",
        "h200-sxm",
        "b200",
        "mi300x",
        "tpu-v6e",
        "gaudi3",
        "l4",
        "t4",
    } <= rows.keys()


@pytest.mark.parametrize(
    ("name", "dtype", "clock_hz", "units", "macs"),
    [
        ("h100-sxm", "bfloat16", 1830e6, 528, 512),
        ("a100-80-sxm", "bfloat16", 1410e6, 432, 256),
        ("mi300x", "bfloat16", 2100e6, 1216, 256),
    ],
)
def test_dense_peaks_follow_from_the_clock(
    name: str, dtype: str, clock_hz: float, units: int, macs: int
) -> None:
    assert load_catalogue()[name].peak(dtype) == pytest.approx(
        clock_hz * units * macs * 2, rel=0.002
    )


def test_no_dtype_of_half_the_width_is_more_than_about_twice_as_fast() -> None:
    """A sparse figure next to a dense one would show as four times."""
    for row in load_catalogue().values():
        for narrow in ("float8_e4m3", "int8"):
            if narrow in row.peak_flops and "bfloat16" in row.peak_flops:
                assert row.peak(narrow) < 2.1 * row.peak("bfloat16"), row.name


@pytest.mark.parametrize(
    ("device", "name"),
    [("NVIDIA H200", "h200-sxm"), ("Tesla T4", "t4"), ("H100-SXM", "h100-sxm"), ("l4", "l4")],
)
def test_find_by_driver_name(device: str, name: str) -> None:
    assert find_accelerator(device).name == name


def test_an_ambiguous_or_unknown_name_lists_what_fits() -> None:
    with pytest.raises(BadInput, match=r"several.*h100-sxm, h100-pcie, h100-nvl"):
        find_accelerator("h100")


def test_a_short_name_lists_what_it_usually_means_first() -> None:
    with pytest.raises(BadInput, match=r"a100-80-sxm, a100-80-pcie, a100-40-sxm.*is a100-80-sxm$"):
        find_accelerator("A100")
    with pytest.raises(BadInput, match=r"unknown.*h200-sxm; fix"):
        find_accelerator("h200")
    assert set(_MOST_MEANT) <= set(load_catalogue())
    with pytest.raises(BadInput, match=r"unknown accelerator.*mi300x"):
        find_accelerator("mi300")
