"""Find the table of kernels in an export of nsys or ncu, among logs and other reports.

`nsys stats` prints several reports one after the other, with log lines between them, and a program
that ncu profiles prints into the same file. The table is recognised by its header: reports with
similar columns (API calls, NVTX ranges, MPI events) are rejected, because their times are not GPU
times. Nsight Compute writes one row per metric or (`--page raw`) one column per metric with a row
of units; both become one row per metric. Numbers may have separators between thousands.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from ridgeline.errors import BadInput

Source = Literal["nsys trace", "nsys sums", "ncu"]
Row = Mapping[str, str]
"""Every column of the header, "" where a row has no value."""

DURATION = ("Duration", "gpu__time_duration.sum")
SHARES = {
    "memory": (
        "DRAM Throughput",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "compute": ("Compute (SM) Throughput", "sm__throughput.avg.pct_of_peak_sustained_elapsed"),
}
"""Metrics of ncu that are shares of a peak, by what they limit."""

UNITS = {"ns": 1e-9, "nsecond": 1e-9, "us": 1e-6, "usecond": 1e-6, "ms": 1e-3, "msecond": 1e-3,
         "s": 1.0, "second": 1.0, "\u00b5s": 1e-6, "\u03bcs": 1e-6}  # fmt: skip
"""Seconds by the units of time that both tools write."""

_OTHER_SUMS = frozenset(("Source", "Style", "Num Calls"))
"""Columns of reports that have those of cuda_gpu_kern_sum too: mpi_event_sum, nvtx_*, *_api_sum."""
_TEXT = re.compile(r"Total Time \(|Start \(|Section: GPU Speed Of Light")
"""What the tools print in tables for people, without commas between the columns."""


def find_tables(text: str) -> Iterator[tuple[Source, list[Row]]]:
    """The tables of kernels, each with its kind and rows. Raises BadInput if there is none."""
    lines, other, is_found = text.split("\n"), list[str](), False
    for i, line in enumerate(lines):
        columns = _cells(line)
        source = _source(set(columns))
        if source is not None:
            is_found = True
            rows: Iterable[Row] = _rows(columns, lines[i + 1 :])
            yield source, list(_long(rows) if _is_wide(columns) else rows)
        elif _is_header(columns):
            other = other or columns
    if not is_found:
        raise unreadable(_why_none(other, text))


def unreadable(why: str) -> BadInput:
    """The error for a file that is no export of kernels."""
    return BadInput(
        "cannot read this as an export of Nsight Systems or Nsight Compute",
        limit="CSV of cuda_gpu_trace, cuda_gpu_kern_sum, or ncu --csv",
        fix=why,
    )


def seconds_of(row: Row, name: str) -> float:
    """The value of a column whose header contains its unit: `Duration (ns)`."""
    for column, value in row.items():
        title, _, unit = column.partition(" (")
        if title == name and value:
            unit = unit.rstrip(")")
            if unit not in UNITS:
                raise unreadable(f"the unit of {column!r} is none of {', '.join(UNITS)}")
            return number_of(value) * UNITS[unit]
    raise unreadable(f"a row has no {name!r}")


def number_of(value: str) -> float:
    """A number with commas between thousands, not negative."""
    try:
        number = float(value.replace(",", ""))
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise unreadable(f"{value!r} is not a number that a time or a count can have")
    return number


def _cells(line: str) -> list[str]:
    """The cells of a line outside of tables; none if it cannot be a header."""
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []


def _parse(lines: Sequence[str]) -> Iterator[list[str]]:
    """Rows of cells; a quoted cell may extend over lines.

    A line of a log may begin with a quotation mark that nothing closes: it is a row by itself and
    does not take the lines after it into a cell. Raises BadInput for a row that is cut off.
    """
    start = 0
    while start < len(lines):
        reader = csv.reader(map(lines.__getitem__, range(start, len(lines))), strict=True)
        num_read = 0
        try:
            for cells in reader:
                yield cells
                num_read = reader.line_num
            return
        except csv.Error as error:
            why = str(error)
        start += num_read
        yield _cells_of_bad_row(lines[start], why)
        start += 1


def _cells_of_bad_row(line: str, why: str) -> list[str]:
    """The cells of a line that begins no row, because its quotation marks are misplaced."""
    try:
        cells = next(csv.reader([line]), [])
    except csv.Error as error:
        raise unreadable(f"its table is damaged: {error}") from None
    if len(cells) > 1 and line.count('"') % 2:
        raise unreadable(f"its table is damaged: {why} in the row {line[:80]!r}")
    return cells


def _source(columns: set[str]) -> Source | None:
    if {"ID", "Kernel Name"} <= columns and (
        {"Metric Name", "Metric Value"} <= columns or "Metric Name" not in columns
    ):
        return "ncu"
    if _has_times(columns, "Start") and _has_times(columns, "Duration") and "Strm" in columns:
        return "nsys trace"
    sums = _has_times(columns, "Total Time") and {"Instances", "Name"} <= columns
    return "nsys sums" if sums and not columns & _OTHER_SUMS else None


def _has_times(columns: Iterable[str], title: str) -> bool:
    """Whether there is a column of times with this title, such as `Start (ns)`."""
    return any(name.startswith(f"{title} (") for name in columns)


def _is_wide(columns: Sequence[str]) -> bool:
    return "Kernel Name" in columns and "Metric Name" not in columns


def _is_header(cells: Sequence[str]) -> bool:
    """Whether a line is the header of any report of the tools."""
    return len(cells) > 2 and (
        "Kernel Name" in cells or any(_has_times(cells, name) for name in ("Start", "Total Time"))
    )


def _why_none(other: Sequence[str], text: str) -> str:
    if not other and _TEXT.search(text):
        return "export CSV instead of text: nsys stats --format csv, ncu --csv"
    if not other:
        return "the file has none of their headers"
    if "Metric Name" in other:
        return "export without --print-summary, one row per launch"
    return f"it is another report, with the columns {', '.join(other[:12])}"


def _rows(columns: Sequence[str], lines: Sequence[str]) -> Iterator[dict[str, str]]:
    """The rows of a table, up to the header of the next one; log lines in it are skipped."""
    for cells in _parse(lines):
        if _is_header(cells):
            return
        if len(cells) > 1:
            padded = [*cells, *[""] * (len(columns) - len(cells))]
            yield dict(zip(columns, padded, strict=False))


def _long(rows: Iterable[Row]) -> Iterator[Row]:
    """Convert a table with one column per metric and a row of units to one row per metric."""
    units: Row = {}
    metrics = {*DURATION, *(name for names in SHARES.values() for name in names)}
    for row in rows:
        if not row["Kernel Name"]:
            units = units if row["ID"] else row
            continue
        for name in metrics & row.keys():
            yield {
                **{column: row.get(column, "") for column in ("Process ID", "ID", "Kernel Name")},
                "Metric Name": name,
                "Metric Unit": units.get(name, ""),
                "Metric Value": row[name],
            }
