"""The files of a result, all of them or none.

They are first written into a hidden folder beside their place, and only when every byte is on the
disk is each moved over its name. A full disk or a folder without permission is found before the
measuring starts (`check_writable`) and, should it still happen at the end, leaves nothing
half-written.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ridgeline.errors import BadInput

ROOM_BYTES = 16_000_000  # a report, a ladder and a configuration fit into a tenth of this


def check_writable(folder: Path) -> None:
    """Make the folder and prove that a result fits in it; BadInput names folder and cause."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".ridgeline-") as probe:
            probe.write(b"\0")
            probe.flush()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise _cannot_write(folder, error) from None
    if free < ROOM_BYTES:
        raise BadInput(
            "the disk under the output folder is nearly full",
            value=f"{free / 1e6:.1f} MB free in {folder}",
            limit=f">= {ROOM_BYTES / 1e6:.0f} MB",
            fix="free some space, or name another folder",
        )


def write_all(folder: Path, contents: Mapping[str, str]) -> tuple[Path, ...]:
    """Write every file of `contents` (name -> text) into `folder`, atomically."""
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
