"""The two protocols that every way of applying a configuration implements.

A `Driver` makes `ServerHandle`s, one per configuration that the search opens. Drivers that start a
server per configuration (a process, a Slurm job) implement it directly. Drivers that change a
server which exists (a container, a Deployment, a Serve application, a script) implement
`ServerControl`, and `InPlaceDriver` adds what they have in common: waiting, restoring the former
configuration after a failure and at the end, and a script that restores it if Ridgeline is killed.

Invariants: a configuration is never left applied, whatever ends the search; a failing start raises
CannotRun with the server's last words; nothing that Ridgeline did not start is stopped for good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec

from ridgeline.errors import CannotRun

Report = Callable[[str], None]
"""Receives a line about what a driver does to a server."""


class Change(msgspec.Struct, frozen=True):
    """A configuration to apply: `flags` to add or replace, and the whole command line with them."""

    flags: tuple[str, ...]
    words: tuple[str, ...]


class Shell(msgspec.Struct, frozen=True):
    """A command line to run. `shown_env`: variables that it is given, for display."""

    words: tuple[str, ...]
    shown_env: tuple[tuple[str, str], ...] = ()


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a change has come.

    `applied`: nothing of the former configuration serves requests any more. `problem`: why it will
    not become ready; None while it may. `note`: what it waits for.
    """

    applied: bool
    problem: str | None = None
    note: str = ""


class ServerControl(Protocol):
    """What differs between the places where a server runs; see the driver of each."""

    @property
    def name(self) -> str:
        """`deployment/chat in namespace prod`."""
        ...

    def read_command(self) -> tuple[str, ...]:
        """The server's command line, from its present state, which becomes the former
        configuration. Raises CannotRun."""
        ...

    def change(self, change: Change) -> None:
        """Begin to apply a configuration. Raises CannotRun."""
        ...

    def restore(self) -> None:
        """Begin to apply the former configuration. Raises CannotRun."""
        ...

    def progress(self) -> Progress:
        """Where the last change stands. Raises CannotRun if that cannot be read at present."""
        ...

    def logs(self) -> str:
        """The end of the server's output, as far as it can be read."""
        ...

    def change_commands(self, change: Change) -> list[Shell]:
        """The commands that `change` runs."""
        ...

    def restore_commands(self) -> list[Shell]:
        """The commands that `restore` runs; a shell can run them without Ridgeline."""
        ...


class ServerCrashedError(CannotRun):
    """A server that had started ended by itself."""


class ServerHandle(Protocol):
    """One configuration of the server, up or not."""

    @property
    def url(self) -> str:
        """Its address; known once it is up."""
        ...

    @property
    def num_starts(self) -> int:
        """A number that changes with every start."""
        ...

    @property
    def is_up(self) -> bool: ...

    def start(self) -> None:
        """Bring it up and wait until it answers.

        Raises CannotRun, and ServerCrashedError once for a process that ended by itself.
        """
        ...

    def stop(self) -> None: ...


class Driver(Protocol):
    """Makes configurations of one server run; a context manager that leaves things as they were."""

    @property
    def side_by_side(self) -> bool:
        """Whether two configurations can be up at once."""
        ...

    def __enter__(self) -> Driver: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def configure(self, flags: Sequence[str], log: Path) -> ServerHandle:
        """A configuration; `log` receives its output."""
        ...

    def plan(self, flags: Sequence[str]) -> list[Shell]:
        """The commands that would apply these flags."""
        ...

    def plan_restore(self) -> list[Shell]:
        """The commands that would restore what was there before."""
        ...
