"""`ridgeline operate` and `ridgeline deploy`: files for the operation of servers."""

from __future__ import annotations

from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.tools import DeployOptions, OperateOptions
from ridgeline.workflows.operate.write_files import write_deployment, write_operation_files


def operate(call: Invocation) -> None:
    """`ridgeline operate`: prints the files that it wrote."""
    for path in write_operation_files(call.read(OperateOptions)):
        print(path)


def deploy(call: Invocation) -> None:
    """`ridgeline deploy`: prints the files that it wrote."""
    for path in write_deployment(call.read(DeployOptions)):
        print(path)
