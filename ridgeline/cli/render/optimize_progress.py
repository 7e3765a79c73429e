"""The live display of a climb: the stage, what is being measured, and the time that is left."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from ridgeline.optimize.output import number_format
from ridgeline.optimize.output.units import minutes_and_seconds
from ridgeline.optimize.progress import SearchProgress
from ridgeline.optimize.result import Trial

STYLES = {"kept": "green", "regressed": "red", "crashed": "red", "cannot run": "red"}


class Display:
    """An `Observer` on a terminal; verdicts scroll past above one live line."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[left]} left"),
            TextColumn("[dim]{task.fields[doing]}"),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("Starting", total=1.0, left="", doing="")
        self._num_trials = 0

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def progress(self, now: SearchProgress) -> None:
        self._progress.update(
            self._task,
            description=now.stage,
            completed=now.spent_s,
            total=now.total_s,
            left=minutes_and_seconds(now.total_s - now.spent_s),
            doing=now.doing,
        )

    def tried(self, trial: Trial) -> None:
        self._num_trials += 1
        line = Text(f"{self._num_trials:>2}  {trial.label}: ")
        line.append(trial.verdict, style=STYLES.get(trial.verdict, "yellow"))
        line.append(f"  {number_format.ratio(trial.ratio)}  {trial.reason}", style="dim")
        self._progress.console.print(line)

    def note(self, text: str) -> None:
        self._progress.update(self._task, doing=text)
