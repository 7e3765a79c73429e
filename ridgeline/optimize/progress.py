"""Progress of a search, reported to an observer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from ridgeline.optimize.result import Trial


class SearchProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The current stage (for example a rung's name), the activity, and the time spent."""

    stage: str
    doing: str
    spent_s: float
    total_s: float


class SearchObserver(Protocol):
    def progress(self, now: SearchProgress) -> None: ...

    def tried(self, trial: Trial) -> None: ...

    def note(self, text: str) -> None: ...


class SilentSearchObserver:
    """Ignores all progress."""

    def progress(self, now: SearchProgress) -> None:
        return None

    def tried(self, trial: Trial) -> None:
        return None

    def note(self, text: str) -> None:
        return None


class LineSearchObserver:
    """Writes one line per stage and verdict, for a log or a pipe."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write, self._stage = write, ""

    def progress(self, now: SearchProgress) -> None:
        if now.stage != self._stage:
            self._stage = now.stage
            left_s = max(0.0, now.total_s - now.spent_s)
            self._write(f"[{now.spent_s:5.0f} s, {left_s:.0f} s left] {now.stage}: {now.doing}")

    def tried(self, trial: Trial) -> None:
        self._write(f"    {trial.verdict}: {trial.reason}")

    def note(self, text: str) -> None:
        self._write(f"    {text}")
