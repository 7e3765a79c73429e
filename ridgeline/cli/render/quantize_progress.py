"""How far `ridgeline quantize` is, on stderr: a bar for people who watch, lines for logs.

The first layer of a large model may take minutes: the time that has passed runs beside the bar from
the start. What is left is what the pipeline says after each layer, counted down.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import (
    BarColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bar
from rich.text import Text

from ridgeline.compress.progress import QuantizeProgress, Tell


@contextmanager
def telling() -> Iterator[Tell]:
    """What the pipeline tells its progress to."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield tell_line
        return
    with bar_on(console) as bar:
        yield Drawn(bar).tell


def bar_on(console: Console) -> Bar:
    """Where it stands, the time that has passed, the time that is left."""
    told = TextColumn("{task.description}")
    return Bar(SpinnerColumn(), told, BarColumn(40), TimeElapsedColumn(), _Left(), console=console)


def tell_line(progress: QuantizeProgress) -> None:
    """A line, and another where there is something worth saying."""
    left = f", {_left(progress.left_s)}" if progress.left_s >= 1 else ""
    at = f"{progress.unit} {progress.layer + 1} of {progress.num_layers}"
    print(f"  {at}: {progress.took_s:.1f} s{left}", file=sys.stderr)
    if progress.note:
        print(f"    {progress.note}", file=sys.stderr)


class Drawn:
    """A bar per unit; notes above it."""

    def __init__(self, bar: Bar) -> None:
        self._bar, self._units = bar, dict[str, TaskID]()
        self._waiting = bar.add_task("the first layer", total=None)

    def tell(self, progress: QuantizeProgress) -> None:
        if progress.unit not in self._units:
            if not self._units:
                self._bar.remove_task(self._waiting)
            self._units[progress.unit] = self._bar.add_task("", total=progress.num_layers)
        done = progress.layer + 1
        self._bar.update(
            self._units[progress.unit],
            completed=done,
            description=f"{progress.unit} {done} of {progress.num_layers}",
            ends_s=perf_counter() + progress.left_s,
        )
        if progress.note:
            self._bar.console.print(f"  {progress.unit} {done}: {progress.note}", markup=False)


class _Left(ProgressColumn):
    """The rest, by what the pipeline said last."""

    def render(self, task: Task) -> Text:
        ends_s = task.fields.get("ends_s")
        if ends_s is None or task.finished:
            return Text("")
        return Text(_left(max(0.0, ends_s - perf_counter())))


def _left(seconds: float) -> str:
    span = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
    return f"about {span} left"
