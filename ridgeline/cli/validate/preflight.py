"""Checks before a command begins: options without an effect, and places to write to.

A mistake on the command line must cost no time, and must not destroy a file.
"""

from __future__ import annotations

from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.validate.output_paths import check_output_paths
from ridgeline.config.commands import Command
from ridgeline.config.rules import RULES, unused
from ridgeline.errors import BadInput


def check_before(invocation: Invocation) -> None:
    """BadInput for the first option that would have no effect, or place that cannot be written."""
    typed = {*invocation.typed, *swept(invocation.typed.get("sweep"))}
    given = filter(invocation.is_given, invocation.command.options)
    check_unused(invocation.command, frozenset(typed), frozenset(given))
    check_output_paths(invocation.command, invocation.values)


def check_unused(command: Command, typed: frozenset[str], given: frozenset[str]) -> None:
    """BadInput for the first typed option that the others make meaningless, or that needs one which
    no source has given."""
    options = command.options
    for rule in RULES.get(command.name, ()):
        for name, relation, other in unused(rule, typed, given):
            flag = options[name].flag
            reason = f" {relation} {options[other].flag}" if relation else f": {other}"
            raise BadInput(f"{flag} has no effect{reason}", fix=f"leave {flag} out")


def swept(sweep: object) -> set[str]:
    """The settings that `simulate --sweep mtbf-s=3600,7200` varies: they count as set."""
    texts = sweep if isinstance(sweep, tuple) else ()
    return {str(text).partition("=")[0].strip().replace("-", "_") for text in texts}
