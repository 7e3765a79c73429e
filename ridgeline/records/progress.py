"""Progress of a long-running workflow, reported as frozen events to an observer.

An observer is any callable that takes one event. `silent` ignores them and is every workflow's
default; `print` shows each event as a line; the command line passes a live display. Observers are
called from the thread that runs the workflow and must return quickly: a benchmark reports every
finished request.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec


class StageStarted(msgspec.Struct, frozen=True, kw_only=True, tag="stage_started"):
    """A named stage begins. `total`: units of work in it, None if unknown; `unit` in the plural."""

    stage: str
    detail: str = ""
    total: float | None = None
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.stage}: {self.detail}" if self.detail else self.stage


class StageAdvanced(msgspec.Struct, frozen=True, kw_only=True, tag="stage_advanced"):
    """Part of a stage is done.

    `completed` and `total` count the stage's units (seconds of a time budget, requests, layers).
    `remaining_s` is an estimate of the time left, None if there is none.
    """

    stage: str
    completed: float
    total: float | None = None
    detail: str = ""
    remaining_s: float | None = None

    @property
    def fraction(self) -> float | None:
        """Completed share in [0, 1]; None if the total is unknown."""
        return min(1.0, self.completed / self.total) if self.total else None

    def __str__(self) -> str:
        share = f" {self.fraction:.0%}" if self.fraction is not None else f" {self.completed:g}"
        return f"{self.stage}:{share}" + (f", {self.detail}" if self.detail else "")


class StageFinished(msgspec.Struct, frozen=True, kw_only=True, tag="stage_finished"):
    """A stage has ended. `detail` summarises it in a few words."""

    stage: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.stage}: {self.detail or 'done'}"


class Message(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    """A remark worth one line."""

    text: str

    def __str__(self) -> str:
        return self.text


class Caution(msgspec.Struct, frozen=True, kw_only=True, tag="caution"):
    """Something that makes the result less reliable or complete than it could be."""

    text: str

    def __str__(self) -> str:
        return f"warning: {self.text}"


class TrialFinished(msgspec.Struct, frozen=True, kw_only=True, tag="trial_finished"):
    """One trial of an optimisation has a verdict.

    `ratio` is the objective after over before, with its 95 % interval as (low, mid, high); None if
    the trial was not measured.
    """

    label: str
    verdict: str
    reason: str
    ratio: tuple[float, float, float] | None = None

    def __str__(self) -> str:
        if self.ratio is None:
            return f"{self.label}: {self.verdict}: {self.reason}"
        low, mid, high = self.ratio
        return f"{self.label}: {self.verdict} {mid:.2f}x [{low:.2f}, {high:.2f}]: {self.reason}"


ProgressEvent = StageStarted | StageAdvanced | StageFinished | Message | Caution | TrialFinished


class Observer(Protocol):
    """Receives the progress of a workflow."""

    def __call__(self, event: ProgressEvent, /) -> object: ...


def silent(event: ProgressEvent, /) -> None:
    """The default observer: ignores every event."""


@contextmanager
def stage(
    observer: Observer, name: str, *, total: float | None = None, unit: str = "", detail: str = ""
) -> Iterator[None]:
    """Report the start of a stage and, unless an exception leaves the block, its end."""
    observer(StageStarted(stage=name, detail=detail, total=total, unit=unit))
    yield
    observer(StageFinished(stage=name))
