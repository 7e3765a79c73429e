"""The console that commands print to: no trailing blanks, and prose wrapped between words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook
from rich.segment import Segment
from rich.text import Text

_WORD = r"""(?:[^\s"']|"[^"]*"|'[^']*')+"""
COMMAND_UNIT = rf"--?[A-Za-z]\S* (?!-){_WORD}|{_WORD}"
"""A flag with its value, or any other word of a command."""


class ReportConsole(Console):
    """A rich console that highlights nothing and ends no line with blanks.

    Tables pad their last column; copied from a terminal or kept in a log, the padding is noise.
    """

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = False) -> None:
        super().__init__(stderr=stderr, soft_wrap=soft_wrap, highlight=False)
        self.push_render_hook(_TrimHook())


def print_prose(out: Console, text: str | Text, style: str = "", column: int | None = None) -> None:
    """Print sentences: on a terminal wrapped between words, elsewhere one line each for tools.

    `column`: where continued lines begin; None: two blanks right of their first line.
    """
    styled = text.copy() if isinstance(text, Text) else Text(text)
    styled.stylize_before(style)
    if not out.is_terminal:
        out.print(styled, soft_wrap=True)
        return
    for line in styled.split("\n", allow_blank=True):
        out.print(_wrapped(out, line, column), soft_wrap=True)


def print_command(out: Console, command: str, indent: int = 2) -> None:
    """Print a shell command: on a terminal in rows that end with a backslash, so that it can be
    copied; elsewhere as one line.
    """
    room = out.width - indent
    rows = [command]
    if out.is_terminal and len(command) > room:
        rows = _command_rows(command, room - 6)
    text = (" \\\n" + " " * (indent + 4)).join(rows)
    out.print(Text(" " * indent + text), soft_wrap=True)


def _command_rows(command: str, room: int) -> list[str]:
    """The words in rows of at most `room` columns where they fit; a flag stays with its value."""
    rows = [""]
    for unit in re.findall(COMMAND_UNIT, command):
        if rows[-1] and len(rows[-1]) + 1 + len(unit) > room:
            rows.append("")
        rows[-1] = f"{rows[-1]} {unit}".lstrip()
    return rows


def _wrapped(out: Console, line: Text, column: int | None) -> Text:
    leading = len(line.plain) - len(line.plain.lstrip(" "))
    hanging = leading + 2 if column is None else column
    body = line[leading:]
    if leading + body.cell_len <= out.width or not body:
        return line
    rows = body.wrap(out, max(20, out.width - hanging))
    for row in rows:
        row.rstrip()
    first, *rest = rows
    return Text("\n").join([Text(" " * leading) + first, *(Text(" " * hanging) + r for r in rest)])


class _TrimHook(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Trimmed(renderable) for renderable in renderables]


class _Trimmed:
    """What it holds, without the blanks before line ends."""

    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        return _without_trailing_blanks(console.render(self._renderable, options))


def _without_trailing_blanks(segments: Iterable[Segment]) -> Iterator[Segment]:
    blanks: list[Segment] = []  # dropped if the line ends behind them
    for segment in segments:
        if segment.control:
            yield segment
            continue
        for i, part in enumerate(segment.text.split("\n")):
            if i:
                blanks.clear()
                yield Segment.line()
            body = part.rstrip(" ")
            if body:
                yield from blanks
                blanks.clear()
                yield Segment(body, segment.style)
            if len(body) < len(part):
                blanks.append(Segment(part[len(body) :], segment.style))
    yield from blanks
