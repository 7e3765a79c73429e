"""`ridgeline explain --max-num-seqs`: a flag as the topic to explain, written as it is used."""

from __future__ import annotations

import click

from ridgeline.cli.params.click_command import OptionCommand

_NOT_A_TOPIC = ("--help", "--help-all", "--json", "--debug", "--")


class ExplainCommand(OptionCommand):
    """Takes a leading flag without a value as the topic.

    With a value, or after a model, a flag sets the option, as in every other command.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from ridgeline.modelspec.checkpoints.locate import is_short_name  # not for `--help`

        topic, *rest = args or [""]
        others = [word for word in rest if word not in ("--json", "--debug")]
        alone = not others or (len(others) == 1 and is_short_name(others[0]))
        is_flag = topic.startswith("--") and "=" not in topic and topic not in _NOT_A_TOPIC
        if is_flag and alone and not ctx.resilient_parsing:
            args = [topic.lstrip("-").removeprefix("no-"), *rest]
        return super().parse_args(ctx, args)
