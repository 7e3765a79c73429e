"""Checks of output paths, made before the work begins whose result is written there.

Files are written next to their place and renamed over it, so the folder must accept new files.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from ridgeline.errors import BadInput


def check_file(path: Path, flag: str) -> None:
    """BadInput unless a file can be written at `path`; `flag` names the option in the error."""
    if path.is_dir():
        raise BadInput(f"{flag} is a folder", value=str(path), fix="name a file")
    if path.exists() and not path.is_file():
        raise BadInput(f"{flag} is not a regular file", value=str(path), fix="name a file")
    if not path.parent.is_dir():
        raise BadInput(f"{flag}: no such folder", value=str(path), fix="create the folder first")
    _check_accepts_files(path.parent, path.name, flag)


def check_folder(path: Path, flag: str) -> None:
    """BadInput unless `path` is a folder, or can be created as one."""
    if path.exists() and not path.is_dir():
        raise BadInput(f"{flag} is a file", value=str(path), fix="name a folder")
    nearest = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not nearest.is_dir():
        raise BadInput(f"{flag} cannot be created: {nearest} is a file", value=str(path))
    _check_accepts_files(nearest, "folder", flag)


def _check_accepts_files(folder: Path, name: str, flag: str) -> None:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}."):
            pass
    except OSError as error:
        raise BadInput(
            f"{flag} cannot be written to", value=str(folder / name), fix=error.strerror
        ) from None
