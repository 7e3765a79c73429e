"""Commands of other tools (kubectl, docker, sbatch, serve), and interruptions while they run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from tempfile import TemporaryFile
from types import FrameType
from typing import IO, Any

import msgspec

from ridgeline.errors import DECODE_ERRORS, CannotRun
from ridgeline.optimize.drivers.base import Report, Shell
from ridgeline.optimize.time_budget import OutOfTimeError, time_left_s

COMMAND_TIMEOUT_S = 120.0
ERROR_CHARS = 600
_QUOTED_OR_ESCAPED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\\r?.""", re.DOTALL)
_ESCAPED = re.compile(r"\\\r?.", re.DOTALL)


def join_lines(command: str) -> str:
    """The command line without backslashes at line ends, as a shell reads it; `shlex` takes them
    for characters of a word."""

    def joined(found: re.Match[str]) -> str:
        text = found[0]
        if text.startswith("'"):
            return text
        return _ESCAPED.sub(lambda pair: "" if pair[0].endswith("\n") else pair[0], text)

    return _QUOTED_OR_ESCAPED.sub(joined, command)


def run(
    words: Sequence[str],
    *,
    timeout_s: float = COMMAND_TIMEOUT_S,
    env: Mapping[str, str] | None = None,
    merged: bool = False,
) -> str:
    """The output of a command (`merged`: with its error output). Raises CannotRun if it fails.

    It runs in its own session: Ctrl-C at the terminal does not cut a change off half-way. Its
    output goes to files, so that a server that it starts in the background may keep them.
    """
    if shutil.which(words[0]) is None:
        raise CannotRun(
            f"{words[0]} is needed and is not on PATH", value=shlex.join(words), fix="install it"
        )
    with TemporaryFile() as out, TemporaryFile() as errors:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT if merged else errors,
            env=None if env is None else {**os.environ, **env},
            start_new_session=True,
        )
        code = _wait(process, words, timeout_s)
        output, complaints = _text(out), _text(errors)
    if code != 0:
        raise CannotRun(
            f"{words[0]} failed with exit code {code}",
            value=shlex.join(words),
            fix=(complaints.strip() or output.strip())[-ERROR_CHARS:] or None,
        )
    return output


def run_json(words: Sequence[str], shape: Any) -> Any:
    """The JSON document that a command prints.

    `shape`: a type that msgspec can decode it as, with whatever the caller relies on. Raises
    CannotRun if the command fails, or prints anything else.
    """
    return parse_json(words, run(words), shape)


def parse_json(words: Sequence[str], text: str, shape: Any) -> Any:
    """The whole JSON document that a command has printed. Raises CannotRun if it has no `shape`."""
    value = shlex.join(words)
    try:
        document = json.loads(text)
    except DECODE_ERRORS as error:
        raise CannotRun(f"{words[0]} did not print JSON", value=value, fix=str(error)) from None
    try:
        msgspec.convert(document, type=shape)
    except msgspec.ValidationError as error:
        what = f"{words[0]} printed JSON that is not what it prints for this command"
        raise CannotRun(what, value=value, fix=f"see what it prints: {error}") from None
    return document


def _wait(process: subprocess.Popen[bytes], words: Sequence[str], timeout_s: float) -> int:
    try:
        return process.wait(timeout_s)
    except BaseException as error:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise CannotRun(
            f"{words[0]} did not finish in {timeout_s:.0f} s", value=shlex.join(words)
        ) from None


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def shell_line(command: Shell) -> str:
    """A command as a line of a shell script."""
    env = [f"{name}={shlex.quote(value)}" for name, value in command.shown_env]
    return " ".join([*env, shlex.join(command.words)])


def sleep_unless_interrupted(seconds: float) -> None:
    """Sleep in a blocking wait inside a coroutine.

    The first Ctrl-C of `asyncio.run` only requests that the task be cancelled, which a thread that
    blocks would not notice for minutes. Raises CancelledError, and OutOfTimeError once the budget
    of the search has no time for this wait.
    """
    time.sleep(seconds)
    if time_left_s() <= 0:
        raise OutOfTimeError
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


@contextmanager
def uninterrupted(report: Report) -> Iterator[None]:
    """Ctrl-C and SIGTERM have no effect inside, except for a line that says so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def wait(number: int, frame: FrameType | None) -> None:
        report("restoring the former configuration; please wait")

    former = {number: signal.signal(number, wait) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
