"""`fleet.toml`: the models of a fleet, how many servers each has, and what they get."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from ridgeline.errors import DECODE_ERRORS, BadInput

MAX_REPLICAS = 10_000  # of one model


class FleetModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model. `./NAME` and `../NAME` begin at the file's folder, and have to be there on every
    machine. `cpus`, `gpus`: of one server, fractions of a GPU too; `serve`: further flags of
    `ridgeline serve`; `resources`: Ray's custom resources, to place servers on certain nodes.
    `surge`: while servers are replaced, one more may run than usual, where the cluster has room.

    With `max_replicas`, the number of servers follows the load: `target_in_flight` requests for
    each, more while one has waited for its first token for `allowed_wait_s`, never below
    `replicas`, and less only when fewer sufficed for `stable_s`. With `rate`
    (requests per second of `input_len` and `output_len` tokens), replicas, gpus and resources
    follow from the fleet's `stock` of devices, and a server takes requests up to four times as long
    where `serve` has no --max-model-len.
    """

    model: str
    replicas: int = 1
    max_replicas: int | None = None
    target_in_flight: float = 16.0
    allowed_wait_s: float | None = None
    stable_s: float = 300.0
    rate: float | None = None
    input_len: int = 1024
    output_len: int = 256
    quantization: str | None = None
    placed_on: str = ""
    cpus: float = 1.0
    gpus: float = 0.0
    serve: tuple[str, ...] = ()
    resources: dict[str, float] = {}
    surge: bool = True

    @property
    def name(self) -> str:
        """Its name in Ray Serve."""
        name = "-".join(part for part in (self.model.rsplit("/", 1)[-1], self.placed_on) if part)
        return "".join(c if c.isalnum() else "-" for c in name)


class FleetFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fleet. `port`: the gateway's; `route`: its further flags; `drain_s`: how long a server that
    is replaced may finish its requests before it hands them over; `stock`: the cluster's devices as
    `h100-sxm=2,l4=4`, for models with a `rate`."""

    models: tuple[FleetModel, ...]
    host: str = "127.0.0.1"
    port: int = 8080
    route: tuple[str, ...] = ()
    drain_s: int = 30
    stock: str = ""


def read_fleet_file(path: Path) -> FleetFile:
    """The fleet in a TOML file. Raises BadInput."""
    try:
        fleet = msgspec.toml.decode(path.read_bytes(), type=FleetFile)
    except OSError as error:
        what = f"the fleet file cannot be read: {error.strerror}"
        raise BadInput(what, value=str(path)) from None
    except DECODE_ERRORS as error:
        raise BadInput(f"the fleet file is not valid: {error}", value=str(path)) from None
    if not fleet.models:
        raise BadInput("the fleet file has no [[models]]", value=str(path))
    fleet = msgspec.structs.replace(
        fleet, models=tuple(_located(model, path.parent) for model in fleet.models)
    )
    _check_gateway(fleet)
    names = [model.name for model in fleet.models]
    for model in fleet.models:
        if names.count(model.name) > 1:
            raise BadInput("two models of the fleet have the same name", value=model.name)
        _check_numbers(model)
        _check_resources(model)
        _check_scaling(model, fleet.stock)
    return fleet


def _located(model: FleetModel, folder: Path) -> FleetModel:
    """With the whole path of a model next to the file: servers start in other folders."""
    if not model.model.startswith(("./", "../")):
        return model
    return msgspec.structs.replace(model, model=str((folder / model.model).resolve()))


def _check_gateway(fleet: FleetFile) -> None:
    if not 1 <= fleet.port <= 65535:
        raise BadInput("the gateway's port is out of range", value=fleet.port, limit="1..65535")
    if not fleet.host or any(c.isspace() for c in fleet.host):
        raise BadInput(
            "the gateway's host is not an address", value=repr(fleet.host), fix='host = "0.0.0.0"'
        )
    if fleet.drain_s < 0:
        raise BadInput("drain_s is negative", value=fleet.drain_s, limit=">= 0")


def _check_numbers(model: FleetModel) -> None:
    if not model.model.strip():
        raise BadInput("a model of the fleet has no name", value=repr(model.model))
    if not 1 <= model.replicas <= MAX_REPLICAS:
        raise BadInput(
            f"replicas of {model.name} are out of range",
            value=model.replicas,
            limit=f"1..{MAX_REPLICAS}",
        )
    for name in ("target_in_flight", "allowed_wait_s", "stable_s", "rate", "cpus", "gpus"):
        number = getattr(model, name)
        if number is not None and not math.isfinite(number):
            raise BadInput(f"{name} of {model.name} is not a finite number", value=number)
    for name in ("input_len", "output_len"):
        if getattr(model, name) < 1:
            raise BadInput(
                f"{name} of {model.name} is too small", value=getattr(model, name), limit=">= 1"
            )
    if model.rate is not None and model.rate <= 0:
        raise BadInput(f"rate of {model.name} must be positive", value=model.rate, limit="> 0")
    if model.rate is None and model.quantization is not None:
        raise BadInput(
            f"quantization of {model.name} has no effect without a rate",
            value=model.quantization,
            fix='use serve = ["--quantization", "…"]',
        )


def _check_resources(model: FleetModel) -> None:
    if model.cpus < 0 or model.gpus < 0:
        value = f"cpus {model.cpus:g}, gpus {model.gpus:g}"
        raise BadInput(f"cpus or gpus of {model.name} are negative", value=value, limit=">= 0")
    if model.gpus > 1 and model.gpus != int(model.gpus):
        raise BadInput(
            f"more than one GPU for {model.name} must be a whole number",
            value=model.gpus,
            limit="a fraction below 1, or 1, 2, …",
        )
    for name, amount in model.resources.items():
        if not name.strip() or name in ("CPU", "GPU", "memory"):
            raise BadInput(
                f"resources of {model.name} need a name that Ray has not taken",
                value=repr(name),
                fix="use cpus and gpus for processors, and other names for the rest",
            )
        if not (math.isfinite(amount) and amount > 0):
            raise BadInput(
                f"resource {name} of {model.name} must be positive", value=amount, limit="> 0"
            )


def _check_scaling(model: FleetModel, stock: str) -> None:
    if model.max_replicas is not None and model.max_replicas < model.replicas:
        raise BadInput(
            "max_replicas is below replicas",
            value=model.max_replicas,
            limit=f">= {model.replicas}",
        )
    waits = model.allowed_wait_s is None or model.allowed_wait_s > 0
    if model.target_in_flight <= 0 or model.stable_s < 0 or not waits:
        raise BadInput(
            "target_in_flight and allowed_wait_s must be positive, stable_s not negative",
            value=model.name,
        )
    if model.rate is None:
        return
    if not stock:
        raise BadInput(
            "a model with a rate needs the fleet's stock of devices",
            value=model.name,
            fix='add a line as stock = "h100-sxm=2,l4=4"',
        )
    if model.replicas != 1 or model.gpus or model.max_replicas is not None or model.resources:
        raise BadInput(
            "rate decides replicas, gpus and resources: leave these out", value=model.name
        )
