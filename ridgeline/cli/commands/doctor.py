"""`ridgeline doctor`: one ✓ or ! line per check, each ! with its remedy; or JSON."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.text import Text

from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.tools import DoctorOptions
from ridgeline.hardware.doctor import Check, diagnose
from ridgeline.report.json_line import json_line


def doctor(call: Invocation) -> int:
    """`ridgeline doctor`."""
    options = call.read(DoctorOptions)
    return command(options.json, options.refresh)


def command(json: bool = False, refresh: bool = False, console: Console | None = None) -> int:
    """Check this machine and print; 1 where something that Ridgeline needs is missing, else 0."""
    checks = diagnose(refresh=refresh)
    ready = all(check.ok for check in checks if check.required)
    if json:
        print(json_line({"ready": ready, "checks": msgspec.to_builtins(checks)}))
    else:
        out = console or Console()
        for check in checks:
            out.print(line(check), soft_wrap=True)
        out.print(verdict(checks, ready), soft_wrap=True)
    return 0 if ready else 1


def line(check: Check) -> Text:
    """One finding, and what to do about it on a line of its own."""
    mark, style = ("✓", "green") if check.ok else ("!", "bold yellow")
    text = Text(f"{mark} ", style=style)
    text.append(f"{check.title:<19} ", style="bold")
    text.append(check.detail, style="default")
    if check.remedy:
        text.append(f"\n  {'':<19} → {check.remedy}", style="yellow")
    return text


def verdict(checks: list[Check], ready: bool) -> Text:
    """The summary: ready or not, and how many things could be better."""
    wrong = sum(not check.ok for check in checks)
    if not ready:
        return Text("Ridgeline cannot run here yet.", style="bold red")
    if wrong:
        return Text(f"Ready; {wrong} of {len(checks)} could be better.", style="yellow")
    return Text("Ready.", style="bold green")
