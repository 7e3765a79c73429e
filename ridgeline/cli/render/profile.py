"""The words and cells of a profile, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ridgeline.diagnose.profile import PhaseTable, Profile, Row

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


def ceilings_line(found: Profile) -> str:
    peaks = ", ".join(f"{kind} {rate / 1e9:.3g}" for kind, rate in found.ceilings.flops_s.items())
    return (
        f"ceilings ({found.peaks.source}): reads {found.peaks.bytes_s / 1e9:.3g} "
        f"GB/s at this model's size; multiplies {peaks} GFLOP/s"
    )


def heading(phase: PhaseTable) -> str:
    steps = f", {phase.steps_per_pass} steps each" * (phase.steps_per_pass > 1)
    return (
        f"{phase.phase}: {phase.what}, {1e3 * phase.pass_s:.4g} ms (without timing its operators "
        f"{1e3 * phase.plain_s:.4g}), bound {1e3 * phase.bound_s:.4g} ms; {phase.num_passes} "
        f"passes{steps}"
    )


def table_lines(phase: PhaseTable) -> Iterator[str]:
    """The phase's rows, then all of it, in columns; as wide as they need, whatever the terminal."""
    rows = [COLUMNS, *map(cells, phase.rows), total(phase)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *figures, limit in rows:
        middle = "  ".join(f"{f:>{width}}" for f, width in zip(figures, widths[1:-1], strict=True))
        yield f"{name:<{widths[0]}}  {middle}  {limit}".rstrip()


def cells(row: Row) -> Sequence[str]:
    """A row as text; what the arithmetic does not know stays empty."""
    of_bound = row.of_bound
    return (
        row.title,
        str(row.calls),
        f"{1e3 * row.time_s:.3f}",
        f"{row.share:.1%}",
        f"{row.nbytes / 1e6:.2f}" if row.nbytes else "",
        f"{row.flops / 1e9:.3g}" if row.flops else "",
        f"{row.intensity:.3g}" if row.intensity else "",
        f"{1e3 * row.bound_s:.3f}" if row.limit else "",
        "" if of_bound is None else f"{of_bound:.0%}",
        row.limit,
    )


def total(phase: PhaseTable) -> Sequence[str]:
    return (
        "all",
        "",
        f"{1e3 * phase.pass_s:.3f}",
        f"{1:.1%}",
        f"{sum(row.nbytes for row in phase.rows) / 1e6:.2f}",
        f"{phase.flops / 1e9:.3g}",
        f"{phase.flops / phase.memory_bytes:.3g}",
        f"{1e3 * phase.bound_s:.3f}",
        f"{phase.bound_s / phase.pass_s:.0%}",
        "",
    )
