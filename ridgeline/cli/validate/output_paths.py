"""Where the command line writes: looked at before a command begins, so that a place that cannot be
written to costs no measurement, and nothing that was read is written over.

A file is later written beside its place and renamed over it (`measure.log.write_file`); hence it
is the folder that must take files. A folder may be yet to be made, by whoever writes into it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ridgeline.errors import BadInput

FILES: dict[str, tuple[str, ...]] = {
    "batch": ("output",),
    "bench": ("json", "log", "html", "trace"),
    "calibrate": ("output",),
    "diagnose": ("html",),
    "mock-server": ("log",),
    "plan": ("html",),
    "predict": ("output",),
    "simulate": ("html", "trace"),
}
FOLDERS: dict[str, tuple[str, ...]] = {
    "optimize": ("output",),
    "plan": ("manifests",),
    "quantize": ("output",),
    "train-drafter": ("output",),
}
"""By command: the options that name what it writes."""


def check_outputs(command: str, values: Mapping[str, Any]) -> None:
    """BadInput for the first place that cannot be written to, that two options name, or that
    another one reads."""
    files = _given(FILES.get(command, ()), values)
    folders = _given(FOLDERS.get(command, ()), values)
    for flag, path in files.items():
        check_file(path, flag)
    for flag, path in folders.items():
        check_folder(path, flag)
    written: dict[Path, str] = {}
    for flag, path in {**files, **folders}.items():
        other = written.setdefault(path.resolve(), flag)
        if other != flag:
            raise BadInput(f"{flag} and {other} name the same place", value=str(path))
    for text, path in _read(values, {*files, *folders}):
        if path.resolve() in written:
            flag = written[path.resolve()]
            what = f"{flag} would be written over what is read"
            raise BadInput(what, value=text, fix=f"name another {flag}")


def check_file(path: Path, flag: str) -> None:
    """BadInput where no file of this name can be written."""
    if path.is_dir():
        raise BadInput(f"{flag} is a folder", value=str(path), fix="name a file")
    if path.exists() and not path.is_file():
        raise BadInput(f"{flag} is no ordinary file", value=str(path), fix="name a file")
    if not path.parent.is_dir():
        raise BadInput(
            f"{flag}: no such folder to write to", value=str(path), fix="create it first"
        )
    _check_takes_files(path.parent, path.name, flag)


def check_folder(path: Path, flag: str) -> None:
    """BadInput where no folder of this name is, or can be made."""
    if path.exists() and not path.is_dir():
        raise BadInput(f"{flag} is a file", value=str(path), fix="name a folder")
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir():
        raise BadInput(f"{flag} cannot be made: {there} is a file", value=str(path))
    _check_takes_files(there, "folder", flag)


def _check_takes_files(folder: Path, name: str, flag: str) -> None:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}."):
            pass
    except OSError as error:
        raise BadInput(
            f"{flag} cannot be written to", value=str(folder / name), fix=error.strerror
        ) from None


def _given(names: tuple[str, ...], values: Mapping[str, Any]) -> dict[str, Path]:
    return {f"--{name}": Path(values[name]) for name in names if values.get(name) is not None}


def _read(values: Mapping[str, Any], written: set[str]) -> Iterator[tuple[str, Path]]:
    """(as given, path) of everything else on the command line that is a file: `FILE`, and what
    stands behind the colon of a recorded workload, `sharegpt:FILE`."""
    for name, value in values.items():
        if f"--{name}" in written or not isinstance(value, str | Path):
            continue
        text = str(value)
        for each in (text, text.partition(":")[2]):
            if each and "\0" not in each and len(each) < 4096 and Path(each).is_file():
                yield text, Path(each)
