"""`ridgeline twin vllm serve MODEL --flags`: everything from the server's program on is its own."""

from __future__ import annotations

import shlex

import click

from ridgeline.cli.params.click_command import OptionCommand


class TwinCommand(OptionCommand):
    """Takes the words after its own options as one argument."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = self.command.options.values()
        valued = {option.flag for option in options if not option.about.positional}
        valued -= {option.flag for option in options if option.type is bool}
        index = 0
        while index < len(args) and args[index].startswith("-"):
            index += 2 if args[index] in valued else 1
        own, rest = args[:index], args[index:]
        return super().parse_args(ctx, [*own, shlex.join(rest)] if rest else own)
