"""Server flags, defined once: a field of `ServerOptions` with a line in its `HELP` is a flag."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import typer

from ridgeline.cli.params.engine import bare, expand, optional
from ridgeline.cli.params.units import count_of, one_of, size_of
from ridgeline.serve.config import HELP, ServerOptions

_PANEL = "Server"
_ENV = {"api_key": "RIDGELINE_API_KEY"}
_QUANTITIES: dict[str, Callable[[str], Callable[[str], int]]] = {
    "max_body_bytes": size_of,
    "max_num_connections": count_of,
    "requests_per_minute": count_of,
    "tokens_per_minute": count_of,
}


def takes_server_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """`command` with one option per server option in place of its parameter `server`: a dict of
    those that were given."""
    fields = [field for field in msgspec.structs.fields(ServerOptions) if field.name in HELP]
    return expand(command, "server", [*map(_parameter, fields)], dict)


def _parameter(field: msgspec.structs.FieldInfo) -> inspect.Parameter:
    flag = "--" + field.name.replace("_", "-")
    kind: Any = bare(field.type)
    shown: dict[str, Any] = {"help": _help(field), "rich_help_panel": _PANEL}
    if field.name in _ENV:
        shown["envvar"] = _ENV[field.name]
    if field.name in _QUANTITIES:
        shown |= {"parser": _QUANTITIES[field.name](flag), "metavar": "N"}
        kind = int
    elif get_origin(kind) is Literal:
        choices = get_args(kind)
        shown |= {"parser": one_of(flag, choices), "metavar": "|".join(choices)}
        kind = str
    return optional(field.name, Annotated[kind | None, typer.Option(flag, **shown)])


def _help(field: msgspec.structs.FieldInfo) -> str:
    text, default = HELP[field.name], field.default
    if default in (None, "", False) or default is msgspec.NODEFAULT or "(default" in text:
        return text
    return f"{text} (default: {default})"
