"""What a server prints when it does not understand its command line, and how it exits."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

import msgspec

from ridgeline.errors import BadInput
from ridgeline.twin.servers.flag_table import FlagTable, Parser


class CommandRefused(BadInput):
    """A command line that the server itself refuses. `log`: what it prints; `exit_code`: its."""

    def __init__(self, problem: str, *, log: str, exit_code: int) -> None:
        super().__init__(problem)
        self.log, self.exit_code = log, exit_code


class _Wording(msgspec.Struct, frozen=True, kw_only=True):
    """The messages of one library that parses command lines."""

    unknown: str
    no_value: str
    no_values: str
    bad_int: str
    bad_float: str
    frame: str
    exit_code: int = 2


_CLICK_TYPE = "Invalid value for '{flag}': '{value}' is not a valid "
_CLAP_TYPE = "invalid value '{value}' for '{flag} <{name}>': invalid "
_LLAMA_VALUE = (
    'error while handling argument "{flag}": %s\n\n'
    "usage:\n{flag}\n\nto show complete usage, run with -h"
)
_WORDINGS: dict[Parser, _Wording] = {
    "argparse": _Wording(
        unknown="unrecognized arguments: {words}",
        no_value="argument {flag}: expected one argument",
        no_values="argument {flag}: expected at least one argument",
        bad_int="argument {flag}: invalid int value: '{value}'",
        bad_float="argument {flag}: invalid float value: '{value}'",
        frame="usage: {usage}\n{program}: error: {problem}",
    ),
    "click": _Wording(
        unknown="No such option: {word}{hint}",
        no_value="Option '{flag}' requires an argument.",
        no_values="Option '{flag}' requires an argument.",
        bad_int=_CLICK_TYPE + "integer.",
        bad_float=_CLICK_TYPE + "float.",
        frame="Usage: {usage}\nTry '{program} --help' for help.\n\nError: {problem}",
    ),
    "clap": _Wording(
        unknown="unexpected argument '{word}' found{hint}",
        no_value="a value is required for '{flag} <{name}>' but none was supplied",
        no_values="a value is required for '{flag} <{name}>' but none was supplied",
        bad_int=_CLAP_TYPE + "digit found in string",
        bad_float=_CLAP_TYPE + "float literal",
        frame="error: {problem}\n\nUsage: {usage}\n\nFor more information, try '--help'.",
    ),
    "llama.cpp": _Wording(
        unknown="error: invalid argument: {word}",
        no_value=_LLAMA_VALUE % "expected value for argument",
        no_values=_LLAMA_VALUE % "expected value for argument",
        bad_int=_LLAMA_VALUE % "stoi",
        bad_float=_LLAMA_VALUE % "stof",
        frame="{problem}",
        exit_code=1,
    ),
}


def unknown_words(table: FlagTable, words: Sequence[str]) -> CommandRefused:
    """The first of the words is a flag that the server does not have, or a word too many."""
    word = words[0]
    if table.parser == "click" and not word.startswith("-"):
        return _refused(table, f"Got unexpected extra argument ({word})")
    near = get_close_matches(word, table.takes) if word.startswith("-") else []
    hint = ""
    if near and table.parser == "click":
        listed = (
            f"Did you mean {near[0]}?"
            if len(near) == 1
            else f"(Possible options: {', '.join(sorted(near))})"
        )
        hint = f" {listed}"
    elif near and table.parser == "clap":
        hint = f"\n\n  tip: a similar argument exists: '{near[0]}'"
    problem = _WORDINGS[table.parser].unknown
    at_root = msgspec.structs.replace(table, program=table.root or table.program)
    return _refused(at_root, problem.format(words=" ".join(words), word=word, hint=hint))


def ambiguous(table: FlagTable, flag: str, matches: Sequence[str]) -> CommandRefused:
    """argparse: the beginning of several flags."""
    return _refused(table, f"ambiguous option: {flag} could match {', '.join(matches)}")


def without_value(table: FlagTable, flag: str) -> CommandRefused:
    """A flag without the value that it takes."""
    wording = _WORDINGS[table.parser]
    is_list = table.takes[flag] == "any number"
    return _refused(table, (wording.no_values if is_list else wording.no_value), flag)


def with_value(table: FlagTable, flag: str, value: str) -> CommandRefused:
    """`--switch=value`."""
    problem = {
        "argparse": f"argument {flag}: ignored explicit argument '{value}'",
        "click": f"Option '{flag}' does not take a value.",
        "clap": f"unexpected value '{value}' for '{flag}' found; no more were expected",
    }
    return _refused(table, problem.get(table.parser, f"error: invalid argument: {flag}={value}"))


def given_twice(table: FlagTable, flag: str) -> CommandRefused:
    """clap takes a flag once."""
    spelt = "{flag}" if table.takes[flag] == "nothing" else "{flag} <{name}>"
    return _refused(table, f"the argument '{spelt}' cannot be used multiple times", flag)


def removed(table: FlagTable, flag: str) -> CommandRefused:
    """llama.cpp: a flag that it knows only to refuse it."""
    problem = _LLAMA_VALUE % f"the argument has been removed. {table.removed[flag]}"
    return _refused(table, problem, flag)


def no_number(table: FlagTable, flag: str, value: str, *, is_float: bool) -> CommandRefused:
    """A value that is not the number which the flag takes."""
    wording = _WORDINGS[table.parser]
    return _refused(table, wording.bad_float if is_float else wording.bad_int, flag, value)


def _refused(table: FlagTable, problem: str, flag: str = "", value: str = "") -> CommandRefused:
    wording = _WORDINGS[table.parser]
    if flag:
        name = flag.lstrip("-").replace("-", "_").upper()
        problem = problem.format(flag=flag, value=value, name=name)
    log = wording.frame.format(usage=table.usage, program=table.program, problem=problem)
    return CommandRefused(f"{table.name}: {problem}", log=log, exit_code=wording.exit_code)
