"""A `click` command made of the rows of the option table.

click was chosen because its commands are objects: a row of the table becomes a `click.Option`
directly, where libraries that read function signatures would need signatures to be generated
first. It also imports in a few hundredths of a second, and completes in every shell.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from ridgeline.cli.render.help import command_help, root_help_all
from ridgeline.config.commands import Command
from ridgeline.config.option import Option
from ridgeline.errors import BadInput

if TYPE_CHECKING:
    from ridgeline.cli.params.invocation import Invocation

Run = Callable[["Invocation"], int | None]
HELP_FLAGS = {"help_option_names": ["-h", "--help"]}


class OptionType(click.ParamType[Any]):
    """Reads text as an option's value, and completes its choices and paths."""

    def __init__(self, option: Option) -> None:
        self.option, self.name = option, option.metavar or "flag"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self.option.read_one(value, self.option.flag)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        if self.option.choices:
            words = map(str, self.option.choices)
            return [CompletionItem(word) for word in words if word.startswith(incomplete)]
        if self.option.about.path is not None or self.option.metavar in ("FILE", "MODEL", "FOLDER"):
            kind = "dir" if self.option.about.path == "folder" else "file"
            return [CompletionItem(incomplete, type=kind)]
        return []


def debug_option() -> click.Option:
    """`--debug`, which `main` looks for itself: it may precede or follow the command."""
    return click.Option(["--debug"], is_flag=True, expose_value=False, help="Show tracebacks.")


def help_all_option() -> click.Option:
    """`--help-all`: the help with the options that are rarely set; at the root, of all commands."""

    def show(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            formatter = ctx.make_formatter()
            if isinstance(ctx.command, OptionCommand):
                command_help(ctx.command.command, formatter, show_all=True)
            else:
                root_help_all(formatter)
            click.echo(formatter.getvalue().rstrip("\n"))
            ctx.exit()

    return click.Option(
        ["--help-all"], is_flag=True, expose_value=False, is_eager=True, callback=show
    )


class OptionCommand(click.Command):
    """A subcommand: its parameters come from its sections; `run` is called with the invocation."""

    def __init__(self, command: Command, run: Run) -> None:
        super().__init__(command.name, help=command.summary, context_settings=dict(HELP_FLAGS))
        self.command, self._run = command, run

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if not self.params:
            options = map(parameter, self.command.options.values())
            self.params = [*options, debug_option(), help_all_option()]
        return super().get_params(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        refuse_old_flags(args, list(self.command.options.values()))
        return super().parse_args(
            ctx, list(gather_words(args, list(self.command.options.values())))
        )

    def invoke(self, ctx: click.Context) -> int:
        from ridgeline.cli.params.invocation import Invocation  # not needed for `--help`

        typed = {
            name: value
            for name, value in ctx.params.items()
            if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        }
        typed = join_arguments(typed, list(self.command.options.values()))
        typed = place_arguments(typed, list(self.command.options.values()))
        return self._run(Invocation(self.command, typed, os.environ)) or 0

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        command_help(self.command, formatter)


def parameter(option: Option) -> click.Parameter:
    """The row as click knows it. Defaults are not click's affair: only what was typed counts."""
    if option.about.positional:
        nargs = -1 if option.about.words else 1
        return click.Argument([option.name], required=False, nargs=nargs, type=OptionType(option))
    flags = [flag for flag in (option.about.short, option.flag) if flag]
    if option.type is bool:
        if option.negative:
            flags = [f"{flags[0]}/{option.negative}", *flags[1:]]
        return click.Option([option.name, *flags], is_flag=True, default=None)
    return click.Option(
        [option.name, *flags], type=OptionType(option), multiple=option.multiple, default=None
    )


def join_arguments(typed: Mapping[str, Any], options: Sequence[Option]) -> dict[str, Any]:
    """`typed`, with the words of an argument that takes several made one value."""
    joined = dict(typed)
    for option in options:
        if option.about.positional and option.about.words and option.name in typed:
            words = joined.pop(option.name)
            if words:
                joined[option.name] = " ".join(words)
    return joined


def place_arguments(typed: Mapping[str, Any], options: Sequence[Option]) -> dict[str, Any]:
    """`typed`, with a lone argument taken for the required one: `generate [MODEL] PROMPT`."""
    arguments = [option for option in options if option.about.positional]
    placed = dict(typed)
    for optional, required in pairwise(arguments):
        is_shifted = required.about.required and not optional.about.required
        if is_shifted and optional.name in placed and required.name not in placed:
            placed[required.name] = placed.pop(optional.name)
    return placed


def refuse_old_flags(args: Sequence[str], options: Sequence[Option]) -> None:
    """BadInput for a flag under a name of an older version or another tool."""
    present = {option.flag for option in options}
    renamed = {old: option.flag for option in options for old in option.old_flags}
    for word in args:
        flag = word.partition("=")[0]
        if flag in renamed and flag not in present:
            raise BadInput(f"{flag} is called {renamed[flag]} here", fix=f"use {renamed[flag]}")


def gather_words(args: Sequence[str], options: Sequence[Option]) -> Iterator[str]:
    """The arguments, with values in several words made one: `--slo ttft:200 tpot:50`, as vLLM
    writes its SLO. A word that does not match the option's pattern ends its value."""
    patterns = {
        option.flag: re.compile(option.about.words) for option in options if option.about.words
    }
    rest = list(args)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag in patterns and (equals or rest):
            words = [value if equals else rest.pop(0)]
            while rest and patterns[flag].fullmatch(rest[0]):
                words.append(rest.pop(0))
            yield f"{flag}={' '.join(words)}"
        else:
            yield word
