"""The cells of an operator profile's tables, for the console and the page."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.diagnose.roofline.operators import PhaseTable, Row
from ridgeline.report.numbers import rounded

COLUMNS = (
    "operator",
    "calls",
    "ms",
    "share",
    "MB",
    "GFLOP",
    "FLOP/byte",
    "bound ms",
    "% of bound",
    "bound by",
)


def operator_cells(row: Row) -> Sequence[str]:
    """One operator; cells that the arithmetic does not know stay empty."""
    of_bound = row.of_bound
    return (
        row.title,
        str(row.calls),
        f"{1e3 * row.time_s:.3f}",
        f"{row.share:.1%}",
        f"{row.nbytes / 1e6:.2f}" if row.nbytes else "",
        rounded(row.flops / 1e9) if row.flops else "",
        rounded(row.intensity) if row.intensity else "",
        f"{1e3 * row.bound_s:.3f}" if row.limit else "",
        "" if of_bound is None else f"{of_bound:.0%}",
        row.limit,
    )


def total_cells(phase: PhaseTable) -> Sequence[str]:
    """The whole phase."""
    return (
        "all",
        "",
        f"{1e3 * phase.pass_s:.3f}",
        f"{1:.1%}",
        f"{sum(row.nbytes for row in phase.rows) / 1e6:.2f}",
        rounded(phase.flops / 1e9),
        rounded(phase.flops / phase.memory_bytes),
        f"{1e3 * phase.bound_s:.3f}",
        f"{phase.bound_s / phase.pass_s:.0%}",
        "",
    )
