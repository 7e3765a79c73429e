"""Changes the configuration of one server that exists, and restores the former one.

One configuration is up at a time. The server's present state is the baseline: it is not restarted
until a candidate is applied. A candidate that does not become ready is undone at once; leaving the
context restores the former configuration, also after Ctrl-C, and a script does it after kill -9.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from ridgeline.errors import CannotRun
from ridgeline.optimize.drivers.base import Change, Progress, Report, ServerControl, Shell
from ridgeline.optimize.drivers.log_errors import last_error
from ridgeline.optimize.drivers.restore_script import RestoreScript
from ridgeline.optimize.drivers.server_process import ServerCommand, answers, models_url
from ridgeline.optimize.drivers.shell import shell_line, sleep_unless_interrupted, uninterrupted

POLL_S = 1.0


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """When a change counts as applied: a GET of `path_url` succeeds, within `timeout_s`.

    None: the list of models at the server's address.
    """

    path_url: str | None = None
    timeout_s: float = 600.0


class InPlaceDriver:
    """A `Driver` around a `ServerControl`."""

    side_by_side = False

    def __init__(
        self,
        control: ServerControl,
        command: ServerCommand,
        readiness: Readiness,
        script: RestoreScript,
        report: Report,
    ) -> None:
        self._control, self._command, self._readiness = control, command, readiness
        self._report, self._script = report, script
        self._current: tuple[str, ...] = ()  # flags that are applied; () is the former state
        self.num_starts = 1

    @property
    def url(self) -> str:
        return self._command.url

    def __enter__(self) -> InPlaceDriver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._current:
            self._restore()

    def configure(self, flags: Sequence[str], log: Path) -> InPlaceConfiguration:
        return InPlaceConfiguration(self, tuple(flags), log)

    def plan(self, flags: Sequence[str]) -> list[Shell]:
        return self._control.change_commands(self._change(flags))

    def plan_restore(self) -> list[Shell]:
        return self._control.restore_commands()

    def runs(self, flags: tuple[str, ...]) -> bool:
        """Whether these flags are applied and the server answers."""
        return self._current == flags and self._answers()

    def apply(self, flags: tuple[str, ...], log: Path) -> None:
        """Apply flags to the former configuration and wait until the server answers.

        Raises CannotRun if it does not; the former configuration is then back.
        """
        if self.runs(flags):
            return
        if not flags and not self._current:
            raise CannotRun("the server does not answer", value=self._ready_url)
        self._script.write([shell_line(command) for command in self._control.restore_commands()])
        former = self._current
        try:
            # Set before the change: an interruption in the middle of it must be undone too.
            self._current = flags or former
            if flags:
                self._control.change(self._change(flags))
            else:
                self._control.restore()
            self.wait_ready()
        except BaseException as error:
            self._write_log(log)
            restored = self._restore()
            if isinstance(error, CannotRun):
                raise CannotRun(
                    f"{error.what}; {restored}",
                    value=error.value,
                    limit=error.limit,
                    fix=error.fix,
                ) from None
            raise
        self._current = flags
        self.num_starts += 1
        if not flags:
            self._script.remove()

    @property
    def _ready_url(self) -> str:
        return self._readiness.path_url or models_url(self.url)

    def _answers(self) -> bool:
        return answers(self._ready_url)

    def _change(self, flags: Sequence[str]) -> Change:
        return Change(tuple(flags), tuple(self._command.words(flags, None)))

    def wait_ready(self, sleep: Callable[[float], None] = sleep_unless_interrupted) -> None:
        """Wait until the last change is applied and the server answers. Raises CannotRun."""
        stop_s = time.monotonic() + self._readiness.timeout_s
        while True:
            progress = self._progress()
            if progress.problem is not None:
                raise self._failure(progress.problem)
            if progress.applied and self._answers():
                return
            if time.monotonic() > stop_s:
                what = progress.note or f"{self._ready_url} did not answer"
                raise self._failure(f"not ready in {self._readiness.timeout_s:.0f} s: {what}")
            sleep(POLL_S)

    def _progress(self) -> Progress:
        try:
            return self._control.progress()
        except CannotRun as error:  # the cluster may be out of reach for a moment
            return Progress(applied=False, note=str(error))

    def _failure(self, what: str) -> CannotRun:
        return CannotRun(
            f"{self._control.name} did not take the configuration: {what}",
            value=last_error(self._logs()) or None,
        )

    def _logs(self) -> str:
        try:
            return self._control.logs()
        except CannotRun as error:
            return f"(no log: {error})"

    def _write_log(self, log: Path) -> None:
        with uninterrupted(self._report), log.open("a", encoding="utf-8") as file:
            file.write(self._logs())

    def _restore(self) -> str:
        """Restore the former configuration; what to say about it."""
        with uninterrupted(self._report):
            try:
                self._control.restore()
                self.wait_ready(time.sleep)
            except Exception as error:
                self._script.dismiss()
                text = (
                    f"{self._control.name}: the former configuration could NOT be restored "
                    f"({error}); run: sh {self._script.path}"
                )
                self._report(text)
                return text
        self._current = ()
        self.num_starts += 1
        self._script.remove()
        self._report(f"{self._control.name}: the former configuration is restored")
        return "the former configuration was restored"


class InPlaceConfiguration:
    """A `ServerHandle`: one set of flags of a server that exists."""

    def __init__(self, driver: InPlaceDriver, flags: tuple[str, ...], log: Path) -> None:
        self._driver, self._flags, self._log = driver, flags, log

    @property
    def url(self) -> str:
        return self._driver.url

    @property
    def num_starts(self) -> int:
        return self._driver.num_starts

    @property
    def is_up(self) -> bool:
        return self._driver.runs(self._flags)

    def start(self) -> None:
        self._driver.apply(self._flags, self._log)

    def stop(self) -> None:
        """Nothing: the next configuration replaces this one, and leaving the driver restores."""
