"""The command line: every command of the table, and the function that runs it.

Nothing is imported for a command before it is called, so that `ridgeline --help` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

import click

import ridgeline
from ridgeline.cli.params.click_command import (
    HELP_FLAGS,
    OptionCommand,
    debug_option,
    help_all_option,
)
from ridgeline.cli.params.explain_command import ExplainCommand
from ridgeline.cli.params.twin_command import TwinCommand
from ridgeline.cli.render.help import root_help
from ridgeline.config.commands import COMMANDS

if TYPE_CHECKING:
    from ridgeline.cli.params.invocation import Invocation

FUNCTIONS = {
    "serve": "run.serve:serve",
    "route": "run.route:route",
    "chat": "run.chat:chat",
    "generate": "run.generate:generate",
    "batch": "run.batch:batch",
    "pull": "run.models:pull",
    "models": "run.models:models",
    "new-key": "run.serve:new_key",
    "bench": "measure.bench:bench_command",
    "diagnose": "measure.diagnose:diagnose",
    "lab": "measure.lab:lab",
    "compare": "measure.compare:compare",
    "top": "measure.top:top",
    "optimize": "optimize:optimize_command",
    "watch": "watch:watch_command",
    "quantize": "quantize:quantize",
    "prune": "shrink:prune",
    "distill": "shrink:distill",
    "train-drafter": "train_drafter:train_drafter",
    "eval": "evaluate:evaluate_command",
    "plan": "planning:plan",
    "predict": "planning:predict",
    "simulate": "simulate:simulate_command",
    "cost": "planning:cost",
    "capacity": "planning:capacity",
    "catalogue": "planning:catalogue",
    "pack": "planning:pack",
    "calibrate": "calibrate:calibrate",
    "explain": "explain:explain",
    "inspect": "inspect:inspect",
    "doctor": "doctor:doctor",
    "mock-server": "measure.mock_server:mock_server",
    "twin": "run.twin:twin",
    "operate": "operate:operate",
    "deploy": "operate:deploy",
    "fleet": "run.fleet:fleet",
    "completion": "tools:completion",
    "version": "tools:version",
}
"""Command → module and function under `ridgeline.cli.commands`."""


class Ridgeline(click.Group):
    """The root: `ridgeline --help` lists the commands by group."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        root_help(formatter)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[:2] == ["explain", "predict"]:  # takes the options of `predict`
            args = ["predict", "--explain", *args[2:]]
        return super().resolve_command(ctx, args)


def run(invocation: Invocation) -> int | None:
    """Check the invocation, import the command's function and call it."""
    from ridgeline.cli.validate.preflight import check_before

    check_before(invocation)
    module, _, function = FUNCTIONS[invocation.command.name].partition(":")
    command = getattr(import_module(f"ridgeline.cli.commands.{module}"), function)
    return cast("int | None", command(invocation))


def _command(name: str) -> OptionCommand:
    kinds = {"explain": ExplainCommand, "twin": TwinCommand}
    return kinds.get(name, OptionCommand)(COMMANDS[name], run)


app = Ridgeline(
    name="ridgeline",
    commands={name: _command(name) for name in COMMANDS},
    context_settings=dict(HELP_FLAGS),
    params=[debug_option(), help_all_option()],
    no_args_is_help=True,
)
click.version_option(ridgeline.__version__, message="%(version)s", help="Print the version.")(app)
