"""The reference pages about options, as Markdown: docs/reference/cli.md and configuration.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ridgeline.config import units
from ridgeline.config.commands import COMMANDS, TABLES, Command
from ridgeline.config.load import BenchOptions
from ridgeline.config.option import Option, Section, options_of
from ridgeline.config.rules import RULES, Displaces, Fixed, Needs, Restricts, Rule
from ridgeline.config.settings import Settings
from ridgeline.config.tools import EnvironmentOptions
from ridgeline.config.units import PORT

SHARED: dict[type[Section], str] = {Settings: "Engine options", BenchOptions: "Load options"}
"""Sections that several commands take, described once."""

CLI_HEAD = """\
# Command line

`ridgeline COMMAND --help` prints the same. `--debug`, before or after the command, shows the
traceback of an error; `-h` is short for `--help`. Commands whose options can be set in a file take
it with `--config`; how values are written, and where else options can come from:
[configuration](configuration.md). An option that would have no effect together with the others is
an error.

Shell completion: `eval "$(ridgeline completion bash)"` in `~/.bashrc` (also `zsh`, `fish`).
"""
CONFIGURATION_HEAD = """\
# Configuration

An option is set, in this order of precedence, by

1. the command line,
2. its environment variable (an empty one counts as unset),
3. the TOML file that `--config FILE` names,
4. its default.

Each table of the file belongs to one group of options; tables that a command does not use are
ignored, unknown tables and keys are errors. `ridgeline optimize` writes such a file, with a table
`[provenance]` that says how it was found.

```toml
[engine]
model = "demo"
max_num_seqs = 16
kv_cache_memory_bytes = "2GiB"

[server]
port = 8000
```

From Python, `ridgeline.config.sources.read_config` reads a file, and the values of a table are the
keyword arguments of the functions that take these options.

## Values

Wherever an option is set, its value may be written as on the command line.
"""


def cli_page() -> str:
    """Every command with its arguments, options and rules."""
    lines = [CLI_HEAD]
    groups = dict.fromkeys(command.group for command in COMMANDS.values())
    for group in groups:
        lines += [f"## {group}", ""]
        for command in COMMANDS.values():
            if command.group == group:
                lines += _command(command)
    for section, title in SHARED.items():
        lines += [f"## {title}", "", *_panels([section]), ""]
    return "\n".join(lines).rstrip() + "\n"


def configuration_page() -> str:
    """How values are written, and every option of a `ridgeline.toml` by table."""
    lines = [CONFIGURATION_HEAD, *_units(), ""]
    for table, section in TABLES.items():
        rows = [_setting(option) for option in options_of(section).values() if option.key]
        lines += [f"## [{table}] {{ #{table} }}", "", f"{section.__doc__}".split("\n")[0], ""]
        lines += _table(("key", "value", "default", "meaning", "environment", "since"), rows)
        lines.append("")
    variables = [
        (f"`{option.env}`", option.metavar, option.default_text, option.about.help)
        for option in options_of(EnvironmentOptions).values()
    ]
    lines += [f"## {EnvironmentOptions.title}", "", f"{EnvironmentOptions.__doc__}", ""]
    lines += [*_table(("environment", "value", "default", "meaning"), variables), ""]
    return "\n".join(lines).rstrip() + "\n"


def _command(command: Command) -> Iterator[str]:
    yield from (
        f"### {command.name}",
        "",
        " ".join(filter(None, (command.summary, command.details))),
    )
    yield ""
    if command.examples:
        yield from ("```sh", *command.examples, "```", "")
    own = [section for section in command.sections if section not in SHARED]
    arguments = [option for option in command.options.values() if option.about.positional]
    if arguments:
        rows = [(f"`{option.flag}`", *_meaning(option)) for option in arguments]
        yield from (*_table(("argument", "meaning", "default"), rows), "")
    yield from _panels(own)
    links = [
        f"[{title}](#{_anchor(title)})"
        for kind, title in SHARED.items()
        if kind in command.sections
    ]
    if links:
        yield from (f"Also takes the {' and the '.join(link.lower() for link in links)}.", "")
    notes = [note for rule in RULES.get(command.name, ()) for note in _rule(rule, command)]
    if notes:
        yield from (*(f"- {note}" for note in notes), "")


def _panels(sections: Sequence[type[Section]]) -> Iterator[str]:
    """The options that have a flag, in one table per panel."""
    panels: dict[str, list[Option]] = {}
    for section in sections:
        for option in options_of(section).values():
            if option.has_flag:
                panels.setdefault(option.panel, []).append(option)
    for panel, options in panels.items():
        rows = [(_flags(option), _value(option), *_meaning(option)) for option in options]
        yield from (*_table((panel.lower(), "value", "meaning", "default"), rows), "")


def _flags(option: Option) -> str:
    flags = [option.about.short, option.flag, option.negative]
    return " ".join(f"`{flag}`" for flag in flags if flag)


def _value(option: Option) -> str:
    if option.type is bool:
        return ""
    if option.choices:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    limits = "" if option.range is None or option.about.unit is PORT else str(option.range)
    return f"{option.metavar}, {limits}" if limits else option.metavar


def _meaning(option: Option) -> tuple[str, str]:
    return option.about.help, option.default_text


def _setting(option: Option) -> tuple[str, ...]:
    value = "true or false" if option.type is bool else _value(option)
    name, environment = f"`{option.key}`", f"`{option.env}`"
    return (name, value, option.default_text, option.about.help, environment, option.about.since)


def _rule(rule: Rule, command: Command) -> Iterator[str]:
    """A rule between options, in words."""
    options = command.options

    def flags(names: Iterable[str]) -> str:
        return ", ".join(f"`{options[name].flag}`" for name in names if name in options)

    if isinstance(rule, Fixed):
        yield f"{flags(rule.options)}: no effect, {rule.reason}."
    elif isinstance(rule, Needs):
        yield f"{flags([rule.option])} needs {flags(rule.others).replace(', ', ' or ')}."
    elif isinstance(rule, Restricts):
        kept = [name for name in rule.kept if name not in Settings.__struct_fields__]
        yield f"With {flags([rule.option])}, only these have an effect: {flags(kept)}."
    elif isinstance(rule, Displaces):
        others = [name for name in rule.others if name not in Settings.__struct_fields__]
        shown = flags(others) if others else "engine options other than `--seed`"
        yield f"{flags([rule.option])} cannot be combined with {shown}."


def _units() -> Iterator[str]:
    rows = [
        ("N, TOKENS, PORT, SEED", units.COUNT.form + ": `8k` is 8000, `8K` is 8192"),
        ("BYTES", units.BYTES.form + ": `512MiB`, `4G` and `4GiB` (binary), `4GB` (decimal)"),
        ("TIME", units.DURATION.form),
        ("MS", units.MILLISECONDS.form),
        ("RATE", units.RATE.form),
        ("SHARE, PERCENT", "a share from 0 to 1; percent"),
        ("USD", units.DOLLARS.form),
        ("SLO", "limits in milliseconds and shares: "
            "`ttft:200 tpot:50 e2e:5000 error:1% attainment:99%`"),
        ("JSON", "an object; in the file, a TOML table"),
    ]  # fmt: skip
    yield from _table(("value", "written as"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")
