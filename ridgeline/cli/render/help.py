"""Help texts, from the tables of commands and options, without slow imports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

import click

from ridgeline.config.commands import COMMANDS, Command
from ridgeline.config.option import Option

SHORT_CHOICES = 22  # characters of choices that are shown in place of a placeholder
NAME_WIDTH = 30  # a longer flag has its text on the next line
START = (
    ("ridgeline chat", "talk to a small model, downloaded on first use"),
    ("ridgeline optimize demo --budget 5m", "find the fastest configuration of a small model"),
    ("ridgeline serve demo", "serve it, with a chat page"),
)


def root_help(formatter: click.HelpFormatter) -> None:
    """`ridgeline --help`: the commands by group, one line each."""
    formatter.write_usage("ridgeline", "COMMAND [OPTIONS]")
    _paragraph(formatter, "Makes LLM inference faster and cheaper, and proves it.")
    with formatter.section(_heading("Start with")):
        formatter.write_dl(START, col_max=40)
    groups: dict[str, list[tuple[str, str]]] = {}
    for command in COMMANDS.values():
        groups.setdefault(command.group, []).append((command.name, command.summary))
    width = max(map(len, COMMANDS))
    for group, rows in groups.items():
        with formatter.section(_heading(group)):
            formatter.write_dl([(name.ljust(width), text) for name, text in rows])
    with formatter.section(_heading("Options")):
        formatter.write_dl(
            [
                ("--version".ljust(width), "Print the version."),
                ("--debug".ljust(width), "Show tracebacks; works before or after a command."),
                ("-h, --help".ljust(width), "Show this, or the help of a command."),
                ("--help-all".ljust(width), "Show every option of every command."),
            ]
        )


def root_help_all(formatter: click.HelpFormatter) -> None:
    """`ridgeline --help-all`: the commands, then every option of each."""
    root_help(formatter)
    for command in COMMANDS.values():
        formatter.write("\n\n")
        command_help(command, formatter, show_all=True)


def command_help(
    command: Command, formatter: click.HelpFormatter, *, show_all: bool = False
) -> None:
    """`ridgeline COMMAND --help`: what it does, examples, and its options by panel.

    `show_all`: also the options that are rarely set (`--help-all`).
    """
    hidden = frozenset[str]() if show_all else command.hidden
    options = command.options.values()
    arguments = [option for option in options if option.about.positional]
    words = [_argument(option) for option in arguments]
    formatter.write_usage(f"ridgeline {command.name}", " ".join([*words, "[OPTIONS]"]))
    _paragraph(formatter, command.summary)
    if command.details:
        _paragraph(formatter, command.details)
    if command.examples:
        with formatter.section(_heading("Examples")):
            for example in command.examples:
                formatter.write(f"  {example}\n")
    if arguments:
        with formatter.section(_heading("Arguments")):
            _rows(formatter, [(option.flag, _text(option)) for option in arguments])
    panels: dict[str, list[tuple[str, str]]] = {}
    for option in options:
        if option.has_flag and option.name not in hidden:
            panels.setdefault(option.panel, []).append((_flags(option), _text(option)))
    panels.setdefault("Other", []).extend(
        [
            ("--debug", "Show tracebacks."),
            ("-h, --help", "Show this help."),
            *([("--help-all", f"Show all options, {len(hidden)} more.")] if hidden else []),
        ]
    )
    for panel, rows in panels.items():
        with formatter.section(_heading(panel)):
            _rows(formatter, rows)


def _paragraph(formatter: click.HelpFormatter, text: str) -> None:
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text(text)


def _rows(formatter: click.HelpFormatter, rows: Sequence[tuple[str, str]]) -> None:
    """Two columns, names and texts; the text of a long name begins on the next line."""
    names = [len(name) for name, _ in rows if len(name) <= NAME_WIDTH]
    indent = max(names, default=0) + 4
    for name, text in rows:
        # Not click's own wrapping, which breaks flags at their hyphens.
        lines = wrap(text, formatter.width - indent, break_on_hyphens=False)
        if len(name) > NAME_WIDTH:
            formatter.write(f"  {name}\n")
            name = ""
        for line in lines:
            formatter.write(f"  {name:<{indent - 2}}{line}\n")
            name = ""


def _heading(text: str) -> str:
    return click.style(text, bold=True)


def _argument(option: Option) -> str:
    return option.flag if option.about.required else f"[{option.flag}]"


def _flags(option: Option) -> str:
    flags = ", ".join(filter(None, (option.about.short, option.flag)))
    if option.type is bool:
        return f"{flags}, {option.negative}" if option.negative else flags
    return f"{flags} {_placeholder(option)}"


def _placeholder(option: Option) -> str:
    if option.choices and not option.about.metavar:
        return option.metavar if len(option.metavar) <= SHORT_CHOICES else "CHOICE"
    return option.metavar


def _text(option: Option) -> str:
    return " ".join(_sentences(option))


def _sentences(option: Option) -> Iterator[str]:
    yield option.about.help
    if option.choices and _placeholder(option) != option.metavar:
        yield f"One of {', '.join(map(str, option.choices))}."
    default = option.default_text
    if default and not (option.type is bool and not option.default):
        yield f"[default: {default}]"
