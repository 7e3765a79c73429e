"""`ridgeline operate` and `ridgeline deploy`: files for the operation of servers."""

from __future__ import annotations

from pathlib import Path

from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.tools import DeployOptions, OperateOptions
from ridgeline.report.json_line import json_line
from ridgeline.workflows.operate.write_files import write_deployment, write_operation_files


def operate(call: Invocation) -> None:
    """`ridgeline operate`: prints the files that it wrote."""
    options = call.read(OperateOptions)
    _print_files(write_operation_files(options), options.json)


def deploy(call: Invocation) -> None:
    """`ridgeline deploy`: prints the files that it wrote."""
    options = call.read(DeployOptions)
    _print_files(write_deployment(options), options.json)


def _print_files(files: list[Path], as_json: bool) -> None:
    names = [str(path) for path in files]
    print(json_line({"files": names}) if as_json else "\n".join(names))
