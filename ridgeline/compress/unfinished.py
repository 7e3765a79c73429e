"""Reads the files of an interrupted run, for the run that continues it.

A file gets its name once it is complete, but a full disk, a copy or another program may have
damaged it since. A file that is only out of reach (rights, open files, memory) is not damaged.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ridgeline.errors import DECODE_ERRORS, BadInput, CannotRun, DoesNotFit, UserError

_ERRORS = (OSError, LookupError, TypeError, RuntimeError, SafetensorError, *DECODE_ERRORS)
_NO_MEMORY = re.compile("(?i)can(no|')t allocate memory")
_AGAIN = "and run the same command again, which continues"


@contextmanager
def file_of_interrupted_run(file: Path) -> Iterator[None]:
    """Raise BadInput, with the file's name, for whatever the block cannot read in it.

    Raises CannotRun or DoesNotFit if the file may be sound and this process cannot read it.
    """
    try:
        yield
    except (*_ERRORS, MemoryError) as error:
        raise _refusal(file, error) from None


def _refusal(file: Path, error: Exception) -> UserError:
    reason = str(error) or type(error).__name__
    value = f"{file}: {reason}"
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or _NO_MEMORY.search(reason):
        return DoesNotFit(
            "the memory is too small to read a file of an interrupted run",
            value=value,
            fix=f"free memory, {_AGAIN}",
        )
    if isinstance(error, PermissionError):
        return CannotRun(
            "this user may not read a file of an interrupted run",
            value=value,
            fix=f"let the user read it, {_AGAIN}",
        )
    if number in (errno.EMFILE, errno.ENFILE):
        return CannotRun(
            "too many files are open to read a file of an interrupted run",
            value=value,
            fix=f"raise the limit (ulimit -n), {_AGAIN}",
        )
    return BadInput(
        "a file of an interrupted run cannot be read",
        value=value,
        fix="delete it, or the folder that it is in, and run the same command again",
    )


@contextmanager
def open_tensors(file: Path) -> Iterator[Any]:
    """A file of tensors. Raises BadInput where it, or what the block looks for, cannot be read."""
    with file_of_interrupted_run(file):
        file.open("rb").close()  # safe_open calls every file that it cannot open missing
        with safe_open(file, framework="pt") as opened:
            yield opened
