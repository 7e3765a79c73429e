"""What a search would do to a server, as commands, without doing any of it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ridgeline.config.improve import OptimizeOptions
from ridgeline.config.settings import Settings
from ridgeline.errors import CannotRun
from ridgeline.optimize.drivers.base import Shell
from ridgeline.optimize.ladder import candidates_of, unmet_need
from ridgeline.workflows.optimize.optimize import prepare_search, with_model_of_server
from ridgeline.workflows.optimize.restartable_server import ServerRecipe, server_recipe
from ridgeline.workflows.optimize.server_driver import RestartableServer


class PlannedChange(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate, its flags, and the commands that would apply it."""

    label: str
    flags: tuple[str, ...]
    commands: tuple[Shell, ...]


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """`server_command`: as it runs now. `restore`: the commands that would bring that back."""

    server_kind: str
    server_command: str
    changes: tuple[PlannedChange, ...]
    restore: tuple[Shell, ...]


def dry_run(settings: Settings, options: OptimizeOptions, server: RestartableServer) -> DryRun:
    """Every candidate of the first round. The server's present state is read, and nothing else.

    A search tries them in the order of their predicted gain, and those of later rounds on top of
    what it kept. Raises BadInput, and CannotRun if the present state cannot be read.
    """
    recipe = server_recipe(server, options.output)
    settings = with_model_of_server(settings, options, recipe)
    return DryRun(
        server_kind=recipe.flags.name,
        server_command=recipe.command.command.replace(" {flags}", ""),
        changes=tuple(_changes(settings, options, recipe)),
        restore=tuple(recipe.driver.plan_restore()),
    )


def _changes(
    settings: Settings, options: OptimizeOptions, recipe: ServerRecipe
) -> Iterator[PlannedChange]:
    job, ladder = prepare_search(settings, options, recipe)
    start = msgspec.to_builtins(job.settings)
    for rung in ladder.rungs:
        if unmet_need(rung, {**start, "server": recipe.flags.name}) is not None:
            continue
        for candidate in candidates_of(rung, job.settings, recipe.settings_in_command):
            try:
                flags = tuple(recipe.flags.words(candidate.settings, job.settings))
            except CannotRun:
                continue  # the server has no flag for it
            if flags and candidate.make is None:
                commands = tuple(recipe.driver.plan(flags))
                yield PlannedChange(label=candidate.label, flags=flags, commands=commands)
