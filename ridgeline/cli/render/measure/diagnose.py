"""The console reports of `ridgeline diagnose`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ridgeline.diagnose.nsight import GpuProfile, Kernel
from ridgeline.diagnose.roofline.operators import PhaseTable, Profile
from ridgeline.diagnose.roofline.text_chart import roofline_text
from ridgeline.report.numbers import rounded
from ridgeline.workflows.diagnose.diagnose_run import Diagnosis
from ridgeline.workflows.diagnose.finding_text import finding_lines, no_finding, shares_line
from ridgeline.workflows.diagnose.nsight_export import NsightResult
from ridgeline.workflows.diagnose.operator_profile import ProfileResult
from ridgeline.workflows.diagnose.profile_cells import COLUMNS, operator_cells, total_cells

MAX_KERNELS, MAX_NAME = 12, 56


def print_diagnosis(diagnosis: Diagnosis, out: Console) -> None:
    """The losses, the ranked findings with their details, and the roofline."""
    losses = diagnosis.losses
    if losses is not None:
        out.print(f"{diagnosis.target}: {losses.num_requests} requests", style="bold", markup=False)
        _print_labelled(out, "where latency went: ", shares_line(losses), style="dim")
    if not diagnosis.findings:
        out.print(f"No finding: {no_finding(diagnosis.losses)}.")
    for number, finding in enumerate(diagnosis.findings, 1):
        out.print()
        _print_labelled(out, f"{number}. ", f"{finding.verdict}: {finding.sentence}")
        for name, value in finding_lines(finding).items():
            _print_labelled(out, f"   {name:<14}", value)
    roof = diagnosis.roof
    if roof is not None:
        out.print()
        for line in roofline_text(roof.points, roof.peaks):
            out.print(line, markup=False, no_wrap=True, crop=False)
        _print_labelled(out, "", f"peaks: {roof.peaks.source}. {roof.note}", style="dim")


def _print_labelled(out: Console, label: str, text: str, style: str | None = None) -> None:
    """A label and its text; on a terminal, wrapped lines are indented to the label's width."""
    lines = [text]
    if out.is_terminal and text:
        lines = textwrap.wrap(text, max(30, out.width - len(label)))
    for i, line in enumerate(lines):
        lead = label if i == 0 else " " * len(label)
        out.print(f"{lead}{line}".rstrip(), style=style, markup=False)


def print_profile(result: ProfileResult, out: Console) -> None:
    """A table per phase, the roofline, and what stands out."""
    profile = result.profile
    out.print(profile.target, style="bold", markup=False)
    out.print(_ceilings_line(profile), style="dim", markup=False)
    for phase in profile.phases:
        out.print()
        out.print(_phase_heading(phase), style="bold", markup=False)
        first, *rest = _phase_lines(phase)
        out.print(first, style="dim", markup=False)
        for line in rest:
            out.print(line, markup=False)
    out.print()
    for line in roofline_text(profile.points, profile.peaks):
        out.print(line, markup=False, no_wrap=True, crop=False)
    out.print()
    for sentence in profile.stands_out:
        out.print(f"- {sentence}", markup=False)


def _ceilings_line(profile: Profile) -> str:
    rates = ", ".join(
        f"{kind} {rounded(rate / 1e9)}" for kind, rate in profile.ceilings.flops_s.items()
    )
    return (
        f"ceilings ({profile.peaks.source}): reads {rounded(profile.peaks.bytes_s / 1e9)} "
        f"GB/s at this model's size; multiplies {rates} GFLOP/s"
    )


def _phase_heading(phase: PhaseTable) -> str:
    steps = f", {phase.steps_per_pass} steps each" * (phase.steps_per_pass > 1)
    return (
        f"{phase.phase}: {phase.what}, {rounded(1e3 * phase.pass_s, 4)} ms (without timing its "
        f"operators {rounded(1e3 * phase.plain_s, 4)}), "
        f"bound {rounded(1e3 * phase.bound_s, 4)} ms; {phase.num_passes} passes{steps}"
    )


def _phase_lines(phase: PhaseTable) -> Iterator[str]:
    """The operators, then the whole phase; as wide as they need, whatever the terminal's width."""
    rows = [COLUMNS, *map(operator_cells, phase.rows), total_cells(phase)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *figures, limit in rows:
        middle = "  ".join(f"{f:>{width}}" for f, width in zip(figures, widths[1:-1], strict=True))
        yield f"{name:<{widths[0]}}  {middle}  {limit}".rstrip()


def print_nsight(result: NsightResult, out: Console) -> None:
    """The kernels, and the findings about them."""
    profile = result.profile
    idle = "" if profile.idle_share is None else f", GPU idle {profile.idle_share:.0%} of the time"
    out.print(
        f"{profile.source}: {rounded(1000 * profile.total_s, 4)} ms in kernels{idle}",
        style="bold",
    )
    kinds = (f"{kind} {share:.0%}" for kind, share in profile.by_kind().items())
    out.print(f"by kind: {', '.join(kinds)}", style="dim")
    out.print(_kernel_table(profile))
    for sentence in result.findings:
        out.print(sentence, markup=False)


def _kernel_table(profile: GpuProfile) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("kernel", "kind", "time", "launches", "each", "memory", "compute", "bound"):
        table.add_column(name, justify="left" if name in ("kernel", "kind", "bound") else "right")
    for kernel in profile.kernels[:MAX_KERNELS]:
        table.add_row(*_kernel_cells(kernel, profile.total_s))
    return table


def _kernel_cells(kernel: Kernel, total_s: float) -> tuple[str, ...]:
    return (
        escape(kernel.name[:MAX_NAME]),
        kernel.kind,
        f"{kernel.total_s / total_s:.1%}",
        str(kernel.count),
        f"{1e6 * kernel.total_s / kernel.count:.1f} us",
        _percent(kernel.memory_share),
        _percent(kernel.compute_share),
        kernel.bound or "–",
    )


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
