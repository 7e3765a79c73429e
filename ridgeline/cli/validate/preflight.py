"""What every command looks at before it begins: its numbers (ranges.py), flags that would change
nothing (idle.py), and where it writes (outputs.py). A mistake on the command line costs no time,
and nothing that is there."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import typer

from ridgeline.cli.validate.output_paths import check_outputs
from ridgeline.cli.validate.ranges import check_numbers
from ridgeline.cli.validate.unused_options import check_idle

_CONTEXT = "typed"  # the parameter that Typer fills with its context


def look_first(app: typer.Typer) -> None:
    """Make every command of `app` do so."""
    for info in app.registered_commands:
        assert info.callback is not None
        info.callback = _looking(info.name or info.callback.__name__, info.callback)


def _looking(command: str, callback: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(callback)
    def looking(**values: Any) -> Any:
        context = values.pop(_CONTEXT)
        check_numbers(command, values)
        check_idle(command, {name for name in values if _was_typed(context, name)}, values)
        check_outputs(command, values)
        return callback(**values)

    kind = inspect.Parameter.KEYWORD_ONLY
    typed = inspect.Parameter(_CONTEXT, kind, annotation=typer.Context)
    signature = inspect.signature(callback, eval_str=True)
    parameters = [each.replace(kind=kind) for each in signature.parameters.values()]
    looking.__signature__ = signature.replace(parameters=[*parameters, typed])  # type: ignore[attr-defined]
    looking.__annotations__ = {each.name: each.annotation for each in (*parameters, typed)}
    return looking


def _was_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
