"""A server of another engine that `optimize` starts with the flags it wants to try."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path, PurePath
from urllib.parse import urlsplit

import msgspec

from ridgeline.config.improve import TargetServerOptions
from ridgeline.config.rules import WAYS_TO_APPLY
from ridgeline.config.server import TwinServerOptions
from ridgeline.config.settings import Settings, settings_from
from ridgeline.diagnose.conditions import Value
from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import find_accelerator
from ridgeline.hardware.machine import Machine
from ridgeline.measure.client.http_target import base_url
from ridgeline.measure.monitors.process_usage import is_local
from ridgeline.modelspec.checkpoints.locate import is_built_in
from ridgeline.modelspec.families.shapes import shape_of_repository
from ridgeline.optimize.drivers.base import Driver, Report
from ridgeline.optimize.drivers.server_process import DEFAULT_PORT, ProcessDriver, ServerCommand
from ridgeline.optimize.external.drafter_rungs import drafter_flags, drafter_rungs
from ridgeline.optimize.external.server_flags import NOTHING, ServerFlags, server_flags_for
from ridgeline.optimize.external.server_rungs import (
    PARALLEL_FLAGS,
    candidate_command_rungs,
    candidate_model_rungs,
    server_rungs,
)
from ridgeline.optimize.ladder import Rung
from ridgeline.optimize.server_settings import FLAGS, ServerSettings, merge_flags
from ridgeline.records.progress import Message, Observer
from ridgeline.twin.config import parse_devices
from ridgeline.twin.servers.command_line import as_read, find_command, server_kinds
from ridgeline.workflows.optimize.server_driver import RestartableServer, open_driver

WITHOUT_GRAPHS = ("--enforce-eager", "--disable-cuda-graph", "--disable-cuda-graphs")
CPU_SERVERS = ("llama-server", "ridgeline")
LIMITING = ("--optimization-level", "--gpu-layers", "--max-batch-total-tokens")
LOW_COMPILE_LEVELS = ("0", "1")  # of vLLM, whose default is 2
WITHOUT_OVERLAP = ("--no-async-scheduling", "--disable-overlap-schedule")
PROBING = "probing this machine (a probe is kept for a day)"
SPECULATES = ("--speculative-config", "--speculative-algorithm", "--spec-type", "--speculate")


def probe_for(
    recipe: ServerRecipe, observer: Observer, probe: Callable[[], Machine]
) -> Machine | None:
    """This machine, probed where the server may run on it; None for one whose device is known."""
    if recipe.device is not None:
        return None
    observer(Message(text=PROBING))
    return probe()


def restartable_server(given: TargetServerOptions) -> RestartableServer | None:
    """The server that the options name; None if they name none."""
    ways = {name: getattr(given, name) for name in WAYS_TO_APPLY}
    if given.url is None:
        return None
    return RestartableServer(
        url=given.url,
        **ways,
        server_cmd=given.server_cmd,
        ready_url=given.ready_url,
        server=given.server,
        served_model_name=given.served_model_name,
        api_key=given.api_key,
        start_timeout_s=given.start_timeout,
        num_devices=given.gpus,
        accelerator=given.accelerator,
        eval_cmd=given.eval_cmd,
        eval_margin=given.eval_margin,
        candidate_models=given.candidate_model,
        candidate_drafters=given.candidate_drafter,
        candidate_commands=given.candidate_cmd,
        compile_cache=given.compile_cache,
    )


def model_of_server(command: str, named: str | None, configured: str) -> str:
    """The model whose sizes and tokenizer the search uses.

    That is the one named for the search, else the one in the server's command line, else the
    configured one. A published shape stands for a model whose files are not on this machine.
    """
    found = find_command(command)
    model = named or (configured if found is None else found[1].model)
    if is_built_in(model) or Path(model).expanduser().exists():
        return model
    shape = shape_of_repository(model)
    return model if shape is None else f"dummy:{shape}"


class ServerRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """A restartable server, checked: its command line, the flags that it knows, and what applies
    them.

    `running_speed`: of a twin that runs already, its modelled seconds per second.
    """

    command: ServerCommand
    flags: ServerFlags
    driver: Driver
    served_model_name: str | None = None
    num_devices: int | None = None
    accelerator: str | None = None
    running_speed: float = 1.0
    api_key: str | None = None
    eval_cmd: str | None = None
    eval_margin: float = 0.0
    candidate_models: tuple[str, ...] = ()
    candidate_drafters: tuple[str, ...] = ()
    candidate_commands: tuple[str, ...] = ()

    @property
    def twin_device(self) -> str | None:
        """The device that the command's twin imitates; None if it starts the server itself."""
        text = self._twin_option("--device", TwinServerOptions(command="").device)
        return None if text is None else parse_devices(text)[0]

    @property
    def speed(self) -> float:
        """Modelled seconds per second of a twin; 1 of any other server. Raises BadInput."""
        text = self._twin_option("--speed", "1")
        if text is None:
            return self.running_speed
        try:
            return float(text)
        except ValueError:
            raise BadInput("--speed must be a number", value=text) from None

    def _twin_option(self, name: str, default: str) -> str | None:
        """The value of an option of `ridgeline twin` in the command; None if it starts no twin."""
        words = shlex.split(self.command.command)
        if ("ridgeline", "twin") not in pairwise(PurePath(word).name for word in words):
            return None
        given = [value for flag, value in pairwise(words) if flag == name]
        given += [word.partition("=")[2] for word in words if word.startswith(f"{name}=")]
        return [*given, default][0]

    @property
    def device(self) -> str | None:
        """The catalogue's device that the server runs on; None if it is that of this machine."""
        if self.accelerator is None:
            return self.twin_device
        return find_accelerator(self.accelerator).name

    def assumed_device(self, *, has_gpu: bool) -> str:
        """What predictions take for granted about the server's device; "" if that is known.

        `has_gpu`: whether this machine has one.
        """
        if not self._is_taken_to_be_here(has_gpu) or self.flags.name in CPU_SERVERS:
            return ""
        return (
            "the server is taken to run on this machine, which has no GPU; "
            "--accelerator names its device"
        )

    def device_facts(self, *, has_gpu: bool) -> dict[str, Value]:
        """`server_device` is "cpu" for a server that this machine, without a GPU, starts itself.

        Empty where the device is another one or unknown.
        """
        host = urlsplit(self.command.url.replace("{port}", "0")).hostname or ""
        is_started_here = isinstance(self.driver, ProcessDriver) and is_local(host)
        is_on_cpu = is_started_here and self._is_taken_to_be_here(has_gpu)
        return {"server_device": "cpu"} if is_on_cpu else {}

    def _is_taken_to_be_here(self, has_gpu: bool) -> bool:
        return self.device is None and not has_gpu

    @property
    def candidate_rungs(self) -> tuple[Rung, ...]:
        """Rungs of the drafters, commands and checkpoints that the user named. Raises BadInput."""
        others = (
            *drafter_rungs(self.flags.name, self.candidate_drafters),
            *candidate_command_rungs(self.candidate_commands),
        )
        if not self.candidate_models:
            return others
        found = find_command(self.command.command)
        if found is None:
            raise BadInput(
                "--candidate-model takes the place of the model in the server's command line, "
                "which names none",
                value=self.command.command,
            )
        kind = self.flags.name
        models = candidate_model_rungs(
            kind, self.command.command, found[1].model, self.candidate_models
        )
        return (*models, *others)

    @property
    def facts(self) -> dict[str, Value]:
        """What rungs may require of the server: its name, and what its command switches off."""
        command, name = self._command_as_read, self.flags.name
        words = set(shlex.split(command))
        own = dict(self.flags.own_flags(command, LIMITING))
        compile_level = own.get("--optimization-level")
        return {
            "server": name if self.twin_device is None else f"twin of {name}",
            "server_eager": not words.isdisjoint(WITHOUT_GRAPHS),
            "server_sync": not words.isdisjoint(WITHOUT_OVERLAP),
            "server_speculates": not words.isdisjoint(SPECULATES),
            "server_compiles_less": compile_level in LOW_COMPILE_LEVELS,
            "server_limits_layers": "--gpu-layers" in own,
            "server_limits_tokens": "--max-batch-total-tokens" in own,
            "server_devices": self.num_devices or _named_devices(command),
        }

    @property
    def defaults(self) -> dict[str, object]:
        """The server's settings without flags: a twin has those of its device's class."""
        shipped = self.flags.defaults
        if self.twin_device is None or self.flags.name not in server_kinds():
            return shipped
        modelled = server_kinds()[self.flags.name].defaults
        return {name: modelled.get(name, value) for name, value in shipped.items()}

    @property
    def settings_in_command(self) -> dict[str, object]:
        """The settings that the command line already makes, with the server's defaults."""
        return {**self.defaults, **self.flags.given(self._command_as_read)}

    @property
    def _command_as_read(self) -> str:
        """The command line with the flags of configuration files, in their long spelling."""
        return self.flags.spell_out(as_read(self.command.command))

    def start_settings(self, settings: Settings) -> ServerSettings:
        """The settings of the server as its command line starts it."""
        rungs = server_rungs(self.flags.name)
        tables = (
            change.get(FLAGS, {}) for rung in rungs for change in (rung.changes, *rung.variants)
        )
        known = {flag for table in tables for flag in table}
        known |= drafter_flags(self.flags.name)
        known |= {flag for flag in PARALLEL_FLAGS.get(self.flags.name, ()) if flag is not None}
        own = self.flags.own_flags(self.command.command, sorted(known))
        return self._settings(settings, {**self.settings_in_command, FLAGS: own})

    def default_settings(self, settings: Settings) -> ServerSettings:
        """The settings of the server without the flags of its command line that the ladder
        changes."""
        start = self.start_settings(settings)
        flags = merge_flags(start.server_flags, self.flags.restored(self.command.command))
        values = {**self.settings_in_command, **self.defaults, FLAGS: flags}
        taken_back = (
            n for n, f in self.flags.flags.items() if isinstance(f, dict) and NOTHING in f
        )
        values |= dict.fromkeys(taken_back)
        return self._settings(settings, values)

    def _settings(self, settings: Settings, values: dict[str, object]) -> ServerSettings:
        checked = settings_from(
            {**msgspec.to_builtins(settings), **{k: v for k, v in values.items() if k != FLAGS}}
        )
        return msgspec.convert(
            {**msgspec.to_builtins(checked), FLAGS: values.get(FLAGS, ())}, ServerSettings
        )

    def serve_script(self, settings: Settings, start: Settings) -> str:
        """A shell script that starts the server with these settings."""
        words = self.command.words(self.flags.words(settings, start), DEFAULT_PORT)
        return f"#!/bin/sh\nexec {shlex.join(words)}\n"


def server_recipe(
    server: RestartableServer, folder: Path, report: Report = lambda line: None
) -> ServerRecipe:
    """Check the server's address, command line and kind, and read its present configuration.

    `folder` receives what a driver writes while it applies configurations; `report` is called with
    lines about them. Raises BadInput, and CannotRun if the server's state cannot be read.
    """
    placeholders = {"{port}": str(DEFAULT_PORT), "{node}": "node", "{service}": "service"}
    address = server.url
    for name, value in placeholders.items():
        address = address.replace(name, value)
    base_url(address)
    command, driver = open_driver(server, folder, report)
    return ServerRecipe(
        command=command,
        flags=server_flags_for(command.command, server.server),
        driver=driver,
        served_model_name=server.served_model_name,
        num_devices=server.num_devices,
        accelerator=server.accelerator,
        api_key=server.api_key,
        eval_cmd=server.eval_cmd,
        eval_margin=server.eval_margin,
        candidate_models=server.candidate_models,
        candidate_drafters=server.candidate_drafters,
        candidate_commands=server.candidate_commands,
    )


def _named_devices(command: str) -> int:
    """Over how many devices a command line spreads one server; 1 where it says nothing."""
    found = find_command(command)
    return 1 if found is None else found[1].tp * found[1].dp
