"""Reads the files of an interrupted run, for the run that continues it.

A file gets its name once it is complete, but a full disk, a copy or another program may have
damaged it since.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ridgeline.errors import DECODE_ERRORS, BadInput

_ERRORS = (OSError, LookupError, TypeError, RuntimeError, SafetensorError, *DECODE_ERRORS)


@contextmanager
def file_of_interrupted_run(file: Path) -> Iterator[None]:
    """Raise BadInput, with the file's name, for whatever the block cannot read in it."""
    try:
        yield
    except _ERRORS as error:
        reason = str(error) or type(error).__name__
        raise BadInput(
            "a file of an interrupted run cannot be read",
            value=f"{file}: {reason}",
            fix="delete it, or the folder that it is in, and run the same command again",
        ) from None


@contextmanager
def open_tensors(file: Path) -> Iterator[Any]:
    """A file of tensors. Raises BadInput where it, or what the block looks for, cannot be read."""
    with file_of_interrupted_run(file), safe_open(file, framework="pt") as opened:
        yield opened
