"""Commands about the program itself: version and completion."""

from __future__ import annotations

import ridgeline
from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.tools import CompletionOptions, VersionOptions
from ridgeline.report.json_line import json_line


def version(call: Invocation) -> None:
    """`ridgeline version`."""
    version = ridgeline.__version__
    as_json = call.read(VersionOptions).json
    print(json_line({"version": version}) if as_json else version)


def completion(call: Invocation) -> None:
    """`ridgeline completion`: a script that makes the shell ask `ridgeline` for completions."""
    from click.shell_completion import get_completion_class

    from ridgeline.cli.app import app
    from ridgeline.cli.main import COMPLETION_VARIABLE

    shell = get_completion_class(call.read(CompletionOptions).shell)
    assert shell is not None
    print(shell(app, {}, "ridgeline", COMPLETION_VARIABLE).source())
