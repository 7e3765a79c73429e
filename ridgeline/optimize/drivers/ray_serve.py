"""Deploys a changed Ray Serve configuration (`--ray`).

The file is the one that was deployed: JSON or YAML, with one application whose `llm_configs` has
one entry with `engine_kwargs` (Ray Serve LLM on vLLM). Flags become engine arguments. `serve
deploy` sends the changed file; to restore, it sends the original one. The cluster's address is that
of the `serve` command line, RAY_DASHBOARD_ADDRESS.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ridgeline.errors import DECODE_ERRORS, BadInput, CannotRun
from ridgeline.optimize.drivers.apply_command import flag_values
from ridgeline.optimize.drivers.base import Change, Progress, Shell
from ridgeline.optimize.drivers.shell import run
from ridgeline.optimize.server_settings import REMOVE, REPLACE

CANDIDATE_FILE = "ridgeline-ray.json"
_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")


class RayApplication:
    """A `ServerControl` for a Serve application of Ray Serve LLM."""

    def __init__(self, config: Path, folder: Path) -> None:
        self._path, self._file = config.absolute(), (folder / CANDIDATE_FILE).absolute()
        try:
            self._document = yaml.safe_load(config.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError, *DECODE_ERRORS) as error:
            raise BadInput(
                "cannot read the Serve configuration", value=str(config), fix=str(error)
            ) from None
        self._application, _ = _engine(self._document, config)

    @property
    def name(self) -> str:
        return f"Serve application {self._application}"

    def read_command(self) -> tuple[str, ...]:
        """`vllm serve MODEL` with the engine's arguments."""
        _, config = _engine(self._document, self._path)
        loading = config.get("model_loading_config") or {}
        model = loading.get("model_source") or loading.get("model_id") or "model"
        words = ["vllm", "serve", str(model)]
        for name, value in (config.get("engine_kwargs") or {}).items():
            words += _flag_words(name, value)
        state = self._application_state()
        if state.get("status") != "RUNNING":
            raise CannotRun(
                f"{self.name} does not run",
                value=state.get("status", "not deployed"),
                fix=f"serve deploy {self._path}",
            )
        return tuple(words)

    def change(self, change: Change) -> None:
        self._file.write_text(json.dumps(self._changed(change), indent=2), encoding="utf-8")
        run(self._deploy(self._file))

    def restore(self) -> None:
        run(self._deploy(self._path))

    def progress(self) -> Progress:
        state = self._application_state()
        status, message = state.get("status", "UNKNOWN"), str(state.get("message") or "")
        if status in _FAILED:
            return Progress(applied=False, problem=f"{status}: {message}"[:600])
        return Progress(applied=status == "RUNNING", note=f"{status} {message}".strip())

    def logs(self) -> str:
        return str(yaml.safe_dump(dict(self._application_state())))

    def change_commands(self, change: Change) -> list[Shell]:
        _, config = _engine(self._changed(change), self._path)
        text = json.dumps(config["engine_kwargs"])
        return [Shell(self._deploy(self._file), (("ENGINE_KWARGS", text),))]

    def restore_commands(self) -> list[Shell]:
        return [Shell(self._deploy(self._path))]

    def _changed(self, change: Change) -> dict[str, Any]:
        document: dict[str, Any] = copy.deepcopy(self._document)
        _, config = _engine(document, self._path)
        values = flag_values(change.flags)
        if replaced := [name for name in values if name.startswith(REPLACE)]:
            raise CannotRun(
                "the model of a Ray Serve application is not replaced",
                value=replaced[0].removeprefix(REPLACE),
                fix="deploy the checkpoint as an application, and compare with `ridgeline eval`",
            )
        removed = engine_arguments(
            {name[len(REMOVE) :]: True for name in values if name.startswith(REMOVE)}
        )
        added = {name: value for name, value in values.items() if name.startswith("--")}
        present = config.get("engine_kwargs") or {}
        config["engine_kwargs"] = {
            **{name: value for name, value in present.items() if name not in removed},
            **engine_arguments(added),
        }
        return document

    def _application_state(self) -> Mapping[str, Any]:
        try:
            status = yaml.safe_load(run(("serve", "status"))) or {}
            return (status.get("applications") or {}).get(self._application) or {}
        except (AttributeError, yaml.YAMLError, *DECODE_ERRORS) as error:
            raise CannotRun("what `serve status` prints cannot be read", fix=str(error)) from None

    def _deploy(self, path: Path) -> tuple[str, ...]:
        return ("serve", "deploy", str(path))


def _engine(document: Any, path: Path) -> tuple[str, dict[str, Any]]:
    """The name of the application that serves an LLM, and its one LLM configuration."""
    engines: list[tuple[str, dict[str, Any]]] = []
    applications = document.get("applications") if isinstance(document, dict) else None
    for application in applications or ():
        arguments = application.get("args") or {}
        engines += [
            (application.get("name", "default"), config)
            for config in arguments.get("llm_configs") or ()
            if isinstance(config, dict)
        ]
    if len(engines) != 1:
        raise BadInput(
            "--ray needs a Serve configuration with one LLM: applications[].args.llm_configs[]",
            value=f"{path} has {len(engines)}",
            fix="write the configuration of that model in the file, not in one that it names",
        )
    return engines[0]


def engine_arguments(values: Mapping[str, str | bool | list[str]]) -> dict[str, Any]:
    """Flags as the engine's arguments: `--no-enable-x` → `enable_x: False`; JSON is parsed."""
    arguments: dict[str, Any] = {}
    for flag, value in values.items():
        name = flag.removeprefix("--").replace("-", "_")
        if value is True and name.startswith("no_"):
            arguments[name.removeprefix("no_")] = False
        else:
            arguments[name] = _parsed(value) if isinstance(value, str) else value
    return arguments


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except DECODE_ERRORS:
        return text


def _flag_words(name: str, value: object) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    return [flag, value if isinstance(value, str) else json.dumps(value)]
