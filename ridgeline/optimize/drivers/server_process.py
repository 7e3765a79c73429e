"""The process of an external server: started with one configuration's flags, awaited, stopped.

With {port} in the command line, each configuration gets a separate port, and both sides of a
comparison stay up together. Without it only one can be up: `ActiveServer` stops one before it
starts the other. That costs a start per change of sides and empties the caches, for both sides
alike.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

from ridgeline.errors import BadInput, CannotRun
from ridgeline.http_replies import open_reply
from ridgeline.optimize.drivers.base import ServerCrashedError, ServerHandle, Shell
from ridgeline.optimize.drivers.log_errors import last_error
from ridgeline.optimize.drivers.restore_script import RESTORE_SCRIPT, RestoreScript
from ridgeline.optimize.drivers.shell import sleep_unless_interrupted
from ridgeline.optimize.server_settings import ANY_VALUE, REMOVE, REPLACE, WHOLE_COMMAND

POLL_S = 0.1
END_S = 20.0
NEEDS_KEY = (401, 403)
MAX_LIST_BYTES = 1 << 16
DEFAULT_PORT = 8000  # of the commands that are printed


class ServerCommand(msgspec.Struct, frozen=True, kw_only=True):
    """How to start the server: its address and command line, with {port} and {flags} to fill in.

    `env`: variables that a process gets in addition to those of this one.
    """

    url: str
    command: str
    start_timeout_s: float = 600.0
    env: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise BadInput("--restart-cmd is not a command line", fix=str(error)) from None
        if "{flags}" not in words:
            raise BadInput(
                "--restart-cmd has no {flags} placeholder for the flags set by the ladder",
                value=self.command,
                fix="write {flags} where they belong, as a separate word",
            )
        if ("{port}" in self.command) != ("{port}" in self.url):
            raise BadInput(
                "{port} must be both in --url and in --restart-cmd, or in neither",
                value=f"{self.url} and {self.command}",
            )

    @property
    def side_by_side(self) -> bool:
        return "{port}" in self.command

    def words(self, flags: Sequence[str], port: int | None) -> list[str]:
        """The command line, ready to run: flags replace those that it already has."""
        filled: list[str] = []
        command, flags = self._command_of(flags)
        words, added = replace_flags(shlex.split(command), flags)
        for word in words:
            if word == "{flags}":
                filled += added
            else:
                filled.append(word if port is None else word.replace("{port}", str(port)))
        return filled

    def _command_of(self, flags: Sequence[str]) -> tuple[str, Sequence[str]]:
        """The command line, or the one that the flags put in its place, and the other flags."""
        if WHOLE_COMMAND not in flags:
            return self.command, flags
        place = list(flags).index(WHOLE_COMMAND)
        return flags[place + 1], [*flags[:place], *flags[place + 2 :]]

    def text(self, flags: Sequence[str]) -> str:
        """The command line with these flags, as one would type it."""
        return shlex.join(self.words(flags, None))

    def at(self, port: int | None) -> str:
        return self.url if port is None else self.url.replace("{port}", str(port))


def replace_flags(words: Sequence[str], flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words with the values of `flags` where they stand, and the flags that are not there.

    `!--flag` removes a switch, `!--flag *` a flag with its value; `@word` takes another word in its
    place. `--flag value`, `--flag=value`, and `--no-flag` in place of `--flag` are known.
    """
    words, added = list(words), []
    for name, *values in _groups(flags):
        if name.startswith(REMOVE):
            words = _without(words, name.removeprefix(REMOVE), has_value=ANY_VALUE in values)
            continue
        if name.startswith(REPLACE):
            words = _with_word(words, name.removeprefix(REPLACE), *values)
            continue
        opposite = "--" + name[5:] if name.startswith("--no-") else "--no-" + name[2:]
        places = [i for i, word in enumerate(words) if word.partition("=")[0] in (name, opposite)]
        if not places:
            added += [name, *values]
            continue
        for place in reversed(places[1:]):
            del words[place : _end(words, place)]
        equals = "=" in words[places[0]] and len(values) == 1
        new = [f"{name}={values[0]}"] if equals else [name, *values]
        words[places[0] : _end(words, places[0])] = new
    return words, added


def _without(words: Sequence[str], flag: str, *, has_value: bool) -> list[str]:
    """The words without a switch, or without a flag and its value."""
    left = list(words)
    for place in reversed([i for i, word in enumerate(words) if word.partition("=")[0] == flag]):
        del left[place : _end(left, place) if has_value else place + 1]
    return left


def _with_word(words: Sequence[str], old: str, new: str) -> list[str]:
    """The words with one of them replaced, also as the value of `--flag=word`."""
    end = f"={old}"
    return [
        new
        if word == old
        else f"{word.removesuffix(end)}={new}"
        if word.startswith("-") and word.endswith(end)
        else word
        for word in words
    ]


def _groups(flags: Sequence[str]) -> list[list[str]]:
    """Every flag with its values."""
    groups: list[list[str]] = []
    for word in flags:
        if _is_flag(word) or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups


def _end(words: Sequence[str], place: int) -> int:
    """Where the flag at a place and its value end. A flag in this file has at most one value."""
    following = words[place + 1 : place + 2]
    has_value = following and not _is_flag(following[0]) and following[0] != "{flags}"
    return place + 2 if has_value and "=" not in words[place] else place + 1


def _is_flag(word: str) -> bool:
    return (
        word.startswith(("-", REMOVE, REPLACE))
        and not word.lstrip("-").replace(".", "", 1).isdigit()
    )


class ServerProcess:
    """One configuration of the server; its output goes to `log`."""

    def __init__(
        self,
        recipe: ServerCommand,
        flags: Sequence[str],
        log: Path,
        note_groups: Callable[[int, bool], None] = lambda group, up: None,
    ) -> None:
        """`note_groups` is called with every process group that starts (True) or ends (False)."""
        self._recipe, self._log, self._note_groups = recipe, log, note_groups
        port = free_port() if recipe.side_by_side else None
        self.url, self.num_starts = recipe.at(port), 0
        self._words = recipe.words(flags, port)
        self._process: subprocess.Popen[bytes] | None = None
        self._out: IO[bytes] | None = None

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server and return once it answers.

        Raises CannotRun, with the end of its log, if it exits or does not answer in time;
        ServerCrashedError if it ended by itself since. The next call starts it again.
        """
        if self.is_up:
            return
        if self._process is not None:
            code = self._process.returncode
            self.stop()
            raise ServerCrashedError(
                f"the server crashed: it ended with code {code} after it had started",
                value=self._last_error(),
                fix=self._see_log(),
            )
        if answers(models_url(self.url)):
            raise CannotRun(
                "another server answers at this address already",
                value=self.url,
                fix="stop it, or write {port} in --url and --restart-cmd",
            )
        self._out = self._log.open("ab")
        try:
            self._process = subprocess.Popen(
                self._words,
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **dict(self._recipe.env)},
                start_new_session=True,
            )
        except OSError as error:
            self.stop()
            raise CannotRun(
                "cannot start the server", value=self._words[0], fix=str(error)
            ) from None
        self._note_groups(self._process.pid, True)
        try:
            self._await_answer(self._process)
        except BaseException:
            self.stop()
            raise
        self.num_starts += 1

    def _await_answer(self, process: subprocess.Popen[bytes]) -> None:
        stop_s = time.monotonic() + self._recipe.start_timeout_s
        while not answers(models_url(self.url)):
            if process.poll() is not None:
                raise self._failure(f"it exited with code {process.returncode} while starting")
            if time.monotonic() > stop_s:
                raise self._failure(f"no answer in {self._recipe.start_timeout_s:.0f} s")
            sleep_unless_interrupted(POLL_S)

    def _failure(self, what: str) -> CannotRun:
        return CannotRun(
            f"the server did not come up: {what}", value=self._last_error(), fix=self._see_log()
        )

    def _last_error(self) -> str | None:
        return last_error(self._log.read_text(encoding="utf-8", errors="replace")) or None

    def _see_log(self) -> str:
        return f"see {self._log}; it was started as {shlex.join(self._words)}"

    def stop(self) -> None:
        """SIGTERM to the process group, then SIGKILL to the processes that are left."""
        process, self._process = self._process, None
        if process is not None:
            _signal(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            _signal(process.pid, signal.SIGKILL)
            process.wait()
            self._note_groups(process.pid, False)
        if self._out is not None:
            self._out.close()
            self._out = None


class ProcessDriver:
    """A `Driver`: each configuration is a process in its own group."""

    def __init__(self, command: ServerCommand, folder: Path) -> None:
        self._command = command
        self._script = RestoreScript(folder / RESTORE_SCRIPT)
        self._running: list[int] = []  # process groups

    @property
    def side_by_side(self) -> bool:
        return self._command.side_by_side

    def __enter__(self) -> ProcessDriver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._script.remove()

    def configure(self, flags: Sequence[str], log: Path) -> ServerProcess:
        return ServerProcess(self._command, flags, log, self._note_group)

    def plan(self, flags: Sequence[str]) -> list[Shell]:
        port = DEFAULT_PORT if self.side_by_side else None
        return [Shell(tuple(self._command.words(flags, port)), self._command.env)]

    def plan_restore(self) -> list[Shell]:
        """Nothing: the processes are Ridgeline's, and end with it."""
        return []

    def _note_group(self, group: int, up: bool) -> None:
        """Keep the script that ends the processes if this one is killed."""
        if up:
            self._running.append(group)
        else:
            self._running.remove(group)
        if not self._running:
            self._script.remove()
            return
        groups = " ".join(f"-{number}" for number in self._running)
        self._script.write(
            [f"kill -s TERM -- {groups}", f"sleep {END_S:.0f}", f"kill -s KILL -- {groups}"]
        )


class ActiveServer:
    """Which servers are up: all of them side by side, or only the one activated last."""

    def __init__(self, side_by_side: bool) -> None:
        self._side_by_side = side_by_side
        self._up: ServerHandle | None = None

    def activate(self, server: ServerHandle) -> None:
        """Make sure that this server is up, stopping another one if necessary."""
        if not self._side_by_side and self._up is not None and self._up is not server:
            self._up.stop()
        self._up = server
        server.start()

    def retire(self, server: ServerHandle) -> None:
        server.stop()
        if self._up is server:
            self._up = None


def models_url(url: str) -> str:
    """Where an OpenAI-compatible server at this address lists its models."""
    return f"{url.rstrip('/').removesuffix('/v1')}/v1/models"


def answers(url: str) -> bool:
    """Whether a GET succeeds, or is refused only for want of a key.

    An empty list of models is that of a router whose servers are still starting.
    """
    try:
        with open_reply(url, 5) as reply:
            is_empty = b'"data":[]' in b"".join(reply.read(MAX_LIST_BYTES).split())
            return bool(reply.status == 200) and not is_empty
    except urllib.error.HTTPError as error:
        return error.code in NEEDS_KEY  # it is up, and wants a key that the measurement has
    except (OSError, ValueError):
        return False


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
