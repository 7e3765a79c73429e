"""The checks of this machine: one ✓ or ! line each, with a remedy below those that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ridgeline.cli.render.console import print_prose
from ridgeline.workflows.check_machine import MachineReadiness

if TYPE_CHECKING:
    from ridgeline.hardware.doctor import Check


def print_readiness(readiness: MachineReadiness, console: Console) -> None:
    for check in readiness.checks:
        print_prose(console, check_text(check), column=22)
    print_prose(console, verdict_text(readiness))


def check_text(check: Check) -> Text:
    """One check, and its remedy on a second line."""
    mark, style = ("✓", "green") if check.ok else ("!", "bold yellow")
    text = Text(f"{mark} ", style=style)
    text.append(f"{check.title:<19} ", style="bold")
    text.append(check.detail, style="default")
    if check.remedy:
        text.append(f"\n  {'':<19} → {check.remedy}", style="yellow")
    return text


def verdict_text(readiness: MachineReadiness) -> Text:
    """Whether Ridgeline can run, and how many checks failed."""
    if not readiness.ready:
        return Text("Ridgeline cannot run here yet.", style="bold red")
    if readiness.num_failed:
        failed = f"{readiness.num_failed} of {len(readiness.checks)}"
        return Text(f"Ready; {failed} could be better.", style="yellow")
    return Text("Ready.", style="bold green")
