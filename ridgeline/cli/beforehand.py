"""What every command looks at before it begins: its numbers (ranges.py), and where it writes
(outputs.py). A mistake on the command line costs no time, and nothing that is there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import typer

from ridgeline.cli.outputs import check_outputs
from ridgeline.cli.ranges import check_numbers


def look_first(app: typer.Typer) -> None:
    """Make every command of `app` do so."""
    for info in app.registered_commands:
        assert info.callback is not None
        info.callback = _looking(info.name or info.callback.__name__, info.callback)


def _looking(command: str, callback: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(callback)
    def looking(**values: Any) -> Any:
        check_numbers(command, values)
        check_outputs(command, values)
        return callback(**values)

    return looking
