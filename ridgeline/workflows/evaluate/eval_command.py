"""Runs the user's own evaluation against one server: `--eval-cmd 'pytest evals --url {url}'`."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from contextlib import suppress

from ridgeline.errors import BadInput, CannotRun
from ridgeline.optimize.quality.user_evaluation import Score, printed_score

TIMEOUT_S = 3600.0


def check_command(command: str) -> None:
    """Raise BadInput for a command that cannot be run against a server."""
    if "{url}" not in command:
        raise BadInput("--eval-cmd has no {url}", value=command, fix="pytest evals --url {url}")
    try:
        shlex.split(command)
    except ValueError as error:
        raise BadInput("--eval-cmd is not a command line", value=command, fix=str(error)) from None


async def run_evaluation(command: str, url: str, model: str | None = None) -> Score:
    """The score that the command prints; 1 without one; None if it fails.

    `{url}` is the server's address and `{model}` the name under which it has the model. Raises
    CannotRun if the program is missing or does not end.
    """
    values = {"{url}": url, "{model}": model or ""}
    words = shlex.split(command)
    for key, value in values.items():
        words = [word.replace(key, value) for word in words]
    try:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True
        )
    except OSError as error:
        raise CannotRun(
            "--eval-cmd cannot be started", value=words[0], fix=error.strerror
        ) from None
    try:
        output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    except BaseException as error:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if not isinstance(error, TimeoutError):
            raise
        raise CannotRun(
            f"--eval-cmd did not finish in {TIMEOUT_S:.0f} s", value=shlex.join(words)
        ) from None
    return printed_score(output.decode("utf-8", "replace")) if process.returncode == 0 else None
