"""Atomic file writes: a file, or a folder of files, is replaced completely or not at all.

Contents go to a temporary name in the same folder, are synced to disk and then renamed, so that a
full disk or an interruption leaves what was there before. `check_writable` finds a read-only or
nearly full folder before a measurement starts.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from ridgeline.errors import BadInput

MIN_FREE_BYTES = 16_000_000  # ten times the size of a report with its data


def write_file(path: Path, parts: Iterable[bytes]) -> None:
    """Write `parts` to `path`, replacing it atomically. Raises BadInput if the disk refuses."""
    temporary: Path | None = None
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        temporary = Path(name)
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        raise BadInput(
            "cannot write the file", value=str(path), fix=error.strerror or str(error)
        ) from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Create the folder and check that results can be written to it. Raises BadInput."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".ridgeline-") as probe:
            probe.write(b"\0")
            probe.flush()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise _cannot_write(folder, error) from None
    if free < MIN_FREE_BYTES:
        raise BadInput(
            "the disk under the output folder is nearly full",
            value=f"{free / 1e6:.1f} MB free in {folder}",
            limit=f">= {MIN_FREE_BYTES / 1e6:.0f} MB",
            fix="free some space, or name another folder",
        )


def write_files(folder: Path, contents: Mapping[str, str]) -> tuple[Path, ...]:
    """Write every file of `contents` (name → text) into `folder`, all or none. Raises BadInput."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".ridgeline-") as staging:
            for name, text in contents.items():
                _write_through(Path(staging) / name, text)
            for name in contents:
                (Path(staging) / name).replace(folder / name)
    except OSError as error:
        raise _cannot_write(folder, error) from None
    return tuple(folder / name for name in contents)


def _write_through(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _cannot_write(folder: Path, error: OSError) -> BadInput:
    return BadInput(
        "cannot write to the output folder",
        value=str(folder),
        limit=error.strerror or str(error),
        fix="name a folder that you may write to, with space left",
    )
