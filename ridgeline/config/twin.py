"""Options of `ridgeline twin`: the devices to imitate, and the server's own command line."""

from __future__ import annotations

from typing import Annotated, ClassVar

from ridgeline.config import shared
from ridgeline.config.option import About, Section
from ridgeline.config.units import NUMBER, Range

SPEED = About("Modelled seconds per second.", unit=NUMBER, range=Range(0, 1e4, exclusive=True))


class TwinServerOptions(Section, frozen=True, kw_only=True):
    """Another server to imitate. `command`: its program and flags, as one line."""

    title: ClassVar[str] = "Twin"
    table: ClassVar[str] = "twin"
    prefix: ClassVar[str] = "twin_"

    command: Annotated[
        str,
        About(
            "The server's command line: vllm serve MODEL, sglang serve, trtllm-serve, "
            "text-generation-launcher or llama-server, with its own flags.",
            positional=True,
            required=True,
            metavar="COMMAND",
        ),
    ]
    device: Annotated[
        str,
        About("Devices of the catalogue that it has.", metavar="NAME[:COUNT]"),
    ] = "h100-sxm:8"
    speed: Annotated[float, SPEED] = 1.0
    acceptance: Annotated[float, shared.ACCEPTANCE] = 0.6
