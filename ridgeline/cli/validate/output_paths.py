"""Places that a command will write to, checked before it begins.

Files are later written beside their place and renamed over it, so the folder must accept files. A
folder may be one that the command creates.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ridgeline.config.commands import Command
from ridgeline.errors import BadInput


def check_output_paths(command: Command, values: Mapping[str, Any]) -> None:
    """BadInput for the first place that cannot be written to, that two options name, or that
    another option reads."""
    written: dict[Path, str] = {}
    inputs: list[str | Path] = []
    for name, option in command.options.items():
        value = values.get(name)
        if option.about.path not in ("file", "folder"):
            inputs += [value] if isinstance(value, str | Path) else []
        elif value is not None:
            check = check_file if option.about.path == "file" else check_folder
            check(value, option.flag)
            other = written.setdefault(value.resolve(), option.flag)
            if other != option.flag:
                raise BadInput(f"{option.flag} and {other} name the same place", value=str(value))
    for value in inputs:
        for path in existing_files(value):
            if path.resolve() in written:
                flag = written[path.resolve()]
                raise BadInput(
                    f"{flag} would overwrite an input", value=str(value), fix=f"name another {flag}"
                )


def check_file(path: Path, flag: str) -> None:
    """BadInput where no file of this name can be written."""
    if path.is_dir():
        raise BadInput(f"{flag} is a folder", value=str(path), fix="name a file")
    if path.exists() and not path.is_file():
        raise BadInput(f"{flag} is not a regular file", value=str(path), fix="name a file")
    if not path.parent.is_dir():
        raise BadInput(f"{flag}: no such folder", value=str(path), fix="create the folder first")
    _check_accepts_files(path.parent, path.name, flag)


def check_folder(path: Path, flag: str) -> None:
    """BadInput where no folder of this name exists or can be created."""
    if path.exists() and not path.is_dir():
        raise BadInput(f"{flag} is a file", value=str(path), fix="name a folder")
    nearest = next(each for each in (path, *path.absolute().parents) if each.exists())
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


def existing_files(value: str | Path) -> Iterator[Path]:
    """The file that an option's value names: as it stands, or after the colon of a recorded
    workload, `sharegpt:FILE`."""
    text = str(value)
    for part in (text, text.partition(":")[2]):
        if part and "\0" not in part and len(part) < 4096 and Path(part).is_file():
            yield Path(part)
