"""`fleet.toml`: the models of a fleet, how many servers each has, and what they get."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ridgeline.errors import BadInput


class FleetModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model. `cpus`, `gpus`: of one server, fractions of a GPU too; `serve`: further flags of
    `ridgeline serve`; `resources`: Ray's custom resources, to place servers on certain nodes."""

    model: str
    replicas: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    serve: tuple[str, ...] = ()
    resources: dict[str, float] = {}

    @property
    def name(self) -> str:
        """Its name in Ray Serve."""
        return "".join(c if c.isalnum() else "-" for c in self.model.rsplit("/", 1)[-1])


class FleetFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fleet. `port`: the gateway's; `route`: its further flags; `drain_s`: how long a server that
    is replaced may finish its requests before it hands them over."""

    models: tuple[FleetModel, ...]
    host: str = "127.0.0.1"
    port: int = 8080
    route: tuple[str, ...] = ()
    drain_s: int = 30


def read_fleet_file(path: Path) -> FleetFile:
    """The fleet in a TOML file. Raises BadInput."""
    try:
        fleet = msgspec.toml.decode(path.read_bytes(), type=FleetFile)
    except OSError as error:
        what = f"the fleet file cannot be read: {error.strerror}"
        raise BadInput(what, value=str(path)) from None
    except msgspec.DecodeError as error:
        raise BadInput(f"the fleet file is not valid: {error}", value=str(path)) from None
    if not fleet.models:
        raise BadInput("the fleet file has no [[models]]", value=str(path))
    names = [model.name for model in fleet.models]
    for model in fleet.models:
        if names.count(model.name) > 1:
            raise BadInput("two models of the fleet have the same name", value=model.name)
        if model.replicas < 1 or model.cpus < 0 or model.gpus < 0:
            raise BadInput(
                "replicas must be at least 1, cpus and gpus not negative", value=model.name
            )
    return fleet
