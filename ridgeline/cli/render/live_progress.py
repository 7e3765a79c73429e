"""Progress of a workflow on stderr: bars on a terminal, lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from ridgeline.cli.render.console import ReportConsole, print_prose
from ridgeline.records.progress import (
    Caution,
    Message,
    Observer,
    ProgressEvent,
    StageAdvanced,
    StageFinished,
    StageStarted,
)


@contextmanager
def live_progress(console: Console | None = None, *, steps: bool = False) -> Iterator[Observer]:
    """An observer that shows progress on stderr until the block ends.

    `steps`: without a terminal, print a line for every step of a stage, not only for its start.
    """
    console = console or ReportConsole(stderr=True)
    if not console.is_terminal:
        yield ProgressLines(console, steps)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(30),
        TextColumn("[dim]{task.fields[detail]}"),
        TimeElapsedColumn(),
        _RemainingColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=2, transient=True) as progress:
        yield _Bars(progress)


class ProgressLines:
    """An observer that prints a line per event, for logs, pipes and servers.

    `steps`: also a line for every step of a stage.
    """

    def __init__(self, console: Console, steps: bool = False) -> None:
        self._console, self._steps = console, steps

    def __call__(self, event: ProgressEvent, /) -> None:
        match event:
            case StageStarted():
                self._print(f"{event} …", "dim")
            case StageAdvanced():
                if self._steps:
                    self._print(f"  {_step(event)}", "dim")
            case StageFinished():
                if event.detail:
                    self._print(f"{event.stage}: {event.detail}", "dim")
            case Caution():
                self._print(event.text, "yellow")
            case Message():
                self._print(event.text, "dim")
            case _:
                self._print(str(event), "")

    def _print(self, text: str, style: str) -> None:
        print_prose(self._console, text, style)


class _Bars:
    """An observer on a terminal: one bar per stage, remarks above them."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, event: ProgressEvent, /) -> None:
        match event:
            case StageStarted():
                self._start(event)
            case StageAdvanced():
                self._advance(event)
            case StageFinished():
                self._finish(event)
            case Caution():
                self._print(event.text, "yellow")
            case Message():
                self._print(event.text, "dim")
            case _:
                self._print(str(event), "")

    def _start(self, event: StageStarted) -> None:
        self._tasks[event.stage] = self._progress.add_task(
            event.stage, total=event.total, detail=event.detail
        )

    def _advance(self, event: StageAdvanced) -> None:
        if event.stage not in self._tasks:
            self._start(StageStarted(stage=event.stage, total=event.total))
        self._progress.update(
            self._tasks[event.stage],
            completed=event.completed,
            total=event.total,
            detail=event.detail,
            remaining_s=event.remaining_s,
        )

    def _finish(self, event: StageFinished) -> None:
        task = self._tasks.pop(event.stage, None)
        if task is not None:
            self._progress.remove_task(task)
        if event.detail:
            self._print(f"{event.stage}: {event.detail}", "dim")

    def _print(self, text: str, style: str) -> None:
        print_prose(self._progress.console, text, style)


class _RemainingColumn(ProgressColumn):
    """The workflow's own estimate of the time left, if it makes one."""

    def render(self, task: Task) -> Text:
        remaining_s = task.fields.get("remaining_s")
        if remaining_s is None or task.finished:
            return Text("")
        return Text(about_left(remaining_s))


def about_left(seconds: float) -> str:
    """`about 3 min left`."""
    span = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
    return f"about {span} left"


def _step(event: StageAdvanced) -> str:
    count = f"{event.completed:g}" + ("" if event.total is None else f" of {event.total:g}")
    parts = [f"{event.stage} {count}", event.detail]
    if event.remaining_s is not None and event.remaining_s >= 1:
        parts.append(about_left(event.remaining_s))
    return ", ".join(filter(None, parts))
