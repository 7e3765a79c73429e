"""`ridgeline operate`: alert rules and dashboards."""

from __future__ import annotations

from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.tools import OperateOptions
from ridgeline.workflows.operate.write_files import write_operation_files


def operate(call: Invocation) -> None:
    """`ridgeline operate`: prints the files that it wrote."""
    for path in write_operation_files(call.read(OperateOptions)):
        print(path)
