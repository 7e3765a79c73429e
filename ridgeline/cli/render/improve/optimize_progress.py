"""Progress of `ridgeline optimize`: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from ridgeline.cli.render.console import print_prose
from ridgeline.optimize.output import number_format
from ridgeline.optimize.output.units import minutes_and_seconds
from ridgeline.records.progress import Observer, ProgressEvent, StageAdvanced, TrialFinished
from ridgeline.stats import Interval

VERDICT_STYLES = {
    "kept": "green",
    "regressed": "red",
    "crashed": "red",
    "cannot run": "red",
    "reverted": "red",
}


@contextmanager
def search_progress(console: Console) -> Iterator[Observer]:
    """An observer of a search until the block ends."""
    if not console.is_terminal:
        yield SearchLines(lambda line: print(line, flush=True))
        return
    columns = (
        SpinnerColumn(),
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[left]} left"),
        TextColumn("[dim]{task.fields[detail]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield SearchDisplay(progress)


class SearchDisplay:
    """The stage, the current measurement and the time left; verdicts scroll past above."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("Starting", total=1.0, left="", detail="")
        self._num_trials = 0

    def __call__(self, event: ProgressEvent, /) -> None:
        match event:
            case StageAdvanced():
                self._progress.update(
                    self._task,
                    description=event.stage,
                    completed=event.completed,
                    total=event.total,
                    left=minutes_and_seconds(event.remaining_s or 0.0),
                    detail=event.detail,
                )
            case TrialFinished():
                self._num_trials += 1
                print_prose(self._progress.console, _trial_line(self._num_trials, event), column=4)
            case _:
                self._progress.update(self._task, detail=str(event))


class SearchLines:
    """One line per stage and verdict, for a log or a pipe."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write, self._stage = write, ""

    def __call__(self, event: ProgressEvent, /) -> None:
        match event:
            case StageAdvanced():
                if event.stage != self._stage:
                    self._stage = event.stage
                    times = f"{event.completed:5.0f} s, {event.remaining_s or 0.0:.0f} s left"
                    self._write(f"[{times}] {event.stage}: {event.detail}")
            case TrialFinished():
                self._write(f"    {event.verdict}: {event.reason}")
            case _:
                self._write(f"    {event}")


def _trial_line(number: int, trial: TrialFinished) -> Text:
    line = Text(f"{number:>2}  {trial.label}: ")
    line.append(trial.verdict, style=VERDICT_STYLES.get(trial.verdict, "yellow"))
    line.append(f"  {_ratio(trial)}  {trial.reason}", style="dim")
    return line


def _ratio(trial: TrialFinished) -> str:
    if trial.ratio is None:
        return number_format.ratio(None)
    low, mid, high = trial.ratio
    return number_format.ratio(Interval(low=low, mid=mid, high=high))
