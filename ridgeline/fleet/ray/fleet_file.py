"""`fleet.toml`: the models of a fleet, how many servers each has, and what they get."""

from __future__ import annotations

import math
import socket
from pathlib import Path

import msgspec

from ridgeline.errors import DECODE_ERRORS, BadInput

MAX_REPLICAS = 10_000  # of one model
_MAX_DRAIN_S = 86_400
_MAX_TOKENS = 10_000_000  # of a prompt, and of an answer
_MAX_CPUS, _MAX_GPUS, _MAX_AMOUNT = 4096, 64, 1e6  # of one server
_NEEDS = {
    **dict.fromkeys(("input_len", "output_len", "quantization"), "rate"),
    **dict.fromkeys(("target_in_flight", "allowed_wait_s", "stable_s"), "max_replicas"),
}
"""Fields without an effect where another one is left out."""


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
    if fleet.stock and all(model.rate is None for model in fleet.models):
        raise BadInput(
            "stock has no effect: no model of the fleet has a rate",
            value=fleet.stock,
            fix="add `rate` to a model, or place servers by `gpus` and `resources`",
        )
    names = [model.name for model in fleet.models]
    for model in fleet.models:
        if names.count(model.name) > 1:
            raise BadInput("two models of the fleet have the same name", value=model.name)
        _check_model(model)
        _check_numbers(model)
        _check_resources(model)
        _check_scaling(model, fleet.stock)
        _check_effect(model)
    return fleet


def _located(model: FleetModel, folder: Path) -> FleetModel:
    """With the whole path of a model next to the file: servers start in other folders."""
    if not model.model.startswith(("./", "../", "~")):
        return model
    try:
        path = Path(model.model).expanduser()
    except RuntimeError:
        raise BadInput("the path of a model names no user's folder", value=model.model) from None
    return msgspec.structs.replace(model, model=str((folder / path).resolve()))


def _check_model(model: FleetModel) -> None:
    if not model.model.strip():
        raise BadInput("a model of the fleet has no name", value=repr(model.model))
    if model.model.startswith("/") and not Path(model.model).exists():
        raise BadInput(
            f"the model {model.name} of the fleet is not there",
            value=model.model,
            fix="./NAME begins at the fleet file's folder; its path is the same on every machine",
        )
    if model.placed_on:
        raise BadInput(
            f"placed_on of {model.name} follows from rate and stock",
            value=model.placed_on,
            fix="leave it out",
        )


def _check_effect(model: FleetModel) -> None:
    """That no value is given which nothing would read."""
    defaults = FleetModel(model=model.model)
    for name, needed in _NEEDS.items():
        value = getattr(model, name)
        if getattr(model, needed) is None and value != getattr(defaults, name):
            own = 'use serve = ["--quantization", "…"]' if name == "quantization" else ""
            raise BadInput(
                f"{name} of {model.name} has no effect without {needed}",
                value=value,
                fix=own or f"add {needed}, or leave it out",
            )


def _check_gateway(fleet: FleetFile) -> None:
    if not 1 <= fleet.port <= 65535:
        raise BadInput("the gateway's port is out of range", value=fleet.port, limit="1..65535")
    if not fleet.host or any(c.isspace() for c in fleet.host):
        raise BadInput(
            "the gateway's host is not an address", value=repr(fleet.host), fix='host = "0.0.0.0"'
        )
    try:
        socket.getaddrinfo(fleet.host, None, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:  # UnicodeError: a label of the name is too long
        why = error.strerror if isinstance(error, OSError) else error
        raise BadInput(f"the gateway's host is not an address: {why}", value=fleet.host) from None
    if not 0 <= fleet.drain_s <= _MAX_DRAIN_S:
        raise BadInput(
            "drain_s is out of range", value=fleet.drain_s, limit=f"0..{_MAX_DRAIN_S} seconds"
        )


def _check_numbers(model: FleetModel) -> None:
    for name in ("replicas", "max_replicas"):
        count = getattr(model, name)
        if count is not None and not 1 <= count <= MAX_REPLICAS:
            raise BadInput(
                f"{name} of {model.name} is out of range", value=count, limit=f"1..{MAX_REPLICAS}"
            )
    for name in ("target_in_flight", "allowed_wait_s", "stable_s", "rate", "cpus", "gpus"):
        number = getattr(model, name)
        if number is not None and not math.isfinite(number):
            raise BadInput(f"{name} of {model.name} is not a finite number", value=number)
    for name in ("input_len", "output_len"):
        if not 1 <= getattr(model, name) <= _MAX_TOKENS:
            raise BadInput(
                f"{name} of {model.name} is out of range",
                value=getattr(model, name),
                limit=f"1..{_MAX_TOKENS}",
            )
    if model.rate is not None and model.rate <= 0:
        raise BadInput(f"rate of {model.name} must be positive", value=model.rate, limit="> 0")


def _check_resources(model: FleetModel) -> None:
    if not (0 <= model.cpus <= _MAX_CPUS and 0 <= model.gpus <= _MAX_GPUS):
        raise BadInput(
            f"cpus or gpus of {model.name} are out of range",
            value=f"cpus {model.cpus:g}, gpus {model.gpus:g}",
            limit=f"cpus 0..{_MAX_CPUS}, gpus 0..{_MAX_GPUS}",
        )
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
        if not 0 < amount <= _MAX_AMOUNT:
            raise BadInput(
                f"resource {name} of {model.name} must be positive",
                value=amount,
                limit=f"> 0, <= {_MAX_AMOUNT:g}",
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
