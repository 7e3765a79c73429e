"""The flags of a climb on somebody else's server, read into `RestartableServer` or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.params.engine import expand, optional, refuse
from ridgeline.cli.params.units import duration_of

if TYPE_CHECKING:
    from ridgeline.workflows.optimize.restartable_server import RestartableServer

_PANEL = "Another server"
ROWS: tuple[tuple[str, str], ...] = (
    ("url", "Climb the server that answers here: 'http://127.0.0.1:{port}'."),
    ("restart_cmd", "Starts it; {flags} is filled in, and {port}, for two side by side."),
    ("server", "vllm, llama-server, sglang or ridgeline (default: told by the command line)."),
    ("served_model_name", "The model to ask for (default: its first)."),
)


def takes_elsewhere_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """`command` with these flags in place of its parameter `elsewhere`, a dict of those given."""
    flags = [
        optional(name, Annotated[str | None, typer.Option(help=text, rich_help_panel=_PANEL)])
        for name, text in ROWS
    ]
    timeout = typer.Option(
        help="How long a start may take. (default: 10m)",
        rich_help_panel=_PANEL,
        parser=duration_of("--start-timeout"),
        metavar="TIME",
    )
    flags.append(optional("start_timeout", Annotated[float | None, timeout]))
    return expand(command, "elsewhere", flags, dict)


def server_options(given: dict[str, Any]) -> RestartableServer | None:
    """Both --url and --restart-cmd, or none of these flags at all."""
    from ridgeline.workflows.optimize.restartable_server import RestartableServer

    for needed in ("url", "restart_cmd"):
        if needed not in given:
            refuse([_flag(name) for name in given], f"without {_flag(needed)}")
            return None
    timeout_s = given.pop("start_timeout", None)
    return RestartableServer(
        **given, **({} if timeout_s is None else {"start_timeout_s": timeout_s})
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
