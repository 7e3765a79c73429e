"""Sizes that decode steps are padded to, so that few graphs serve all steps.

A graph has a fixed number of rows and of block-table columns. Rows are padded by at most half, or
by 7 from 16 rows on: an empty row costs arithmetic that a step bound by memory does not notice.
Columns grow by fours, because a kernel reads only the columns that a row uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_ROWS = 256
"""Steps of more rows are bound by arithmetic, and the time between kernels is hidden behind it."""
_SMALL = (1, 2, 4, 8)
_STEP, _WIDE_STEP, _WIDE_FROM = 8, 32, 64
_LEAST_COLUMNS, _COLUMN_FACTOR = 32, 4


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a graph: rows, and columns of their block tables."""

    rows: int
    columns: int


def row_sizes(max_rows: int) -> tuple[int, ...]:
    """The numbers of rows that graphs have, in ascending order; the last is at least `max_rows`.

    Raises ValueError if `max_rows` is not positive.
    """
    if max_rows < 1:
        raise ValueError(f"a graph needs at least one row, not {max_rows}")
    wide = range(_WIDE_FROM + _WIDE_STEP, max_rows + _WIDE_STEP, _WIDE_STEP)
    sizes = (*_SMALL, *range(2 * _STEP, _WIDE_FROM + 1, _STEP), *wide)
    end = next((i for i, size in enumerate(sizes) if size >= max_rows), len(sizes) - 1)
    return sizes[: end + 1]


def column_sizes(max_columns: int) -> tuple[int, ...]:
    """The numbers of columns that graphs have; the last is `max_columns`."""
    sizes, size = [], _LEAST_COLUMNS
    while size < max_columns:
        sizes.append(size)
        size *= _COLUMN_FACTOR
    return (*sizes, max_columns)


def smallest_fitting(sizes: Sequence[int], needed: int) -> int | None:
    """The smallest of ascending `sizes` that is at least `needed`; None if none is."""
    return next((size for size in sizes if size >= needed), None)
