"""`ridgeline diagnose --nsight FILE`: an export of NVIDIA's profilers, read and judged."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from ridgeline.diagnose.nsight import GpuProfile, Kernel, read_profile, sentences
from ridgeline.errors import BadInput
from ridgeline.report.json_line import json_line

MOST_KERNELS, LONGEST_NAME = 12, 56


def command(file: Path, as_json: bool, console: Console | None = None) -> int:
    """Print what the kernels' time goes into and what bounds it. Raises BadInput."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise BadInput("cannot read the export", value=str(file), fix=str(error)) from None
    profile = read_profile(text)
    if as_json:
        told = {**msgspec.to_builtins(profile), "kinds": profile.by_kind()}
        print(json_line({**told, "findings": sentences(profile)}))
        return 0
    out = console or Console(highlight=False, soft_wrap=True)
    idle = "" if profile.idle_share is None else f", GPU idle {profile.idle_share:.0%} of the time"
    out.print(f"{profile.source}: {1000 * profile.total_s:.4g} ms in kernels{idle}", style="bold")
    kinds = (f"{kind} {share:.0%}" for kind, share in profile.by_kind().items())
    out.print(f"by kind: {', '.join(kinds)}", style="dim")
    out.print(_table(profile))
    for sentence in sentences(profile):
        out.print(sentence, markup=False)
    return 0


def _table(profile: GpuProfile) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("kernel", "kind", "time", "launches", "each", "memory", "compute", "bound"):
        table.add_column(name, justify="left" if name in ("kernel", "kind", "bound") else "right")
    for kernel in profile.kernels[:MOST_KERNELS]:
        table.add_row(*_row(kernel, profile.total_s))
    return table


def _row(kernel: Kernel, total_s: float) -> tuple[str, ...]:
    return (
        kernel.name[:LONGEST_NAME],
        kernel.kind,
        f"{kernel.total_s / total_s:.1%}",
        str(kernel.count),
        f"{1e6 * kernel.total_s / kernel.count:.1f} us",
        _share(kernel.memory_share),
        _share(kernel.compute_share),
        kernel.bound or "–",
    )


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
