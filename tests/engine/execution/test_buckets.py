"""Sizes that decode steps are padded to."""

from __future__ import annotations

import pytest

from ridgeline.engine.execution.graphs.buckets import (
    MAX_ROWS,
    column_sizes,
    row_sizes,
    smallest_fitting,
)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 8, 9, 16, 63, 64, 65, 100, 128, MAX_ROWS])
def test_every_number_of_rows_fits_a_bucket(max_rows: int) -> None:
    sizes = row_sizes(max_rows)
    assert list(sizes) == sorted(set(sizes))
    for rows in range(1, max_rows + 1):
        size = smallest_fitting(sizes, rows)
        assert size is not None and rows <= size <= max(2 * rows - 1, rows + 31)


def test_few_rows_waste_less_than_half_a_bucket() -> None:
    sizes = row_sizes(MAX_ROWS)
    assert [smallest_fitting(sizes, rows) for rows in (1, 2, 3, 5, 9, 17, 33, 65)] == [
        *(1, 2, 4, 8, 16, 24, 40, 96)
    ]


@pytest.mark.parametrize("max_columns", [1, 31, 32, 33, 500, 8192])
def test_the_widest_bucket_holds_the_longest_sequence(max_columns: int) -> None:
    sizes = column_sizes(max_columns)
    assert sizes[-1] == max_columns and list(sizes) == sorted(set(sizes))


def test_a_graph_needs_rows() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        row_sizes(0)


def test_what_exceeds_every_bucket_has_none() -> None:
    assert smallest_fitting((1, 2, 4), 5) is None
