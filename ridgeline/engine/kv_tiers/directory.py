"""Extents in a local directory, which any number of processes may share.

Files appear under their name by renaming, complete or not at all as far as other processes see; a
power failure may leave a name without content, which the checksums of the format show. The time of
modification is that of the last use. Nothing is locked: a file that another process has removed is
read as missing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from ridgeline.engine.kv_tiers.base import ExtentFile
from ridgeline.errors import CannotRun

_TEMPORARY = ".tmp"
_STALE_S = 3600.0  # after which the temporary file of a process that died is removed


class ExtentDirectory:
    """Files below `root`, readable by their owner alone. Raises CannotRun if it is not writable."""

    def __init__(self, root: Path) -> None:
        self.root, self._counter = root, count()
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CannotRun(
                "the directory of --kv-tier-dir cannot be created",
                value=str(root),
                fix=f"name a directory that this user may write to ({error.strerror})",
            ) from None
        if not os.access(root, os.W_OK | os.X_OK):
            raise CannotRun(
                "the directory of --kv-tier-dir is not writable",
                value=str(root),
                fix="name a directory that this user may write to",
            )
        self._remove_stale()

    def list(self) -> list[ExtentFile]:
        files = []
        for path in self.root.rglob("*.kv"):
            with suppress(OSError):
                stat = path.stat()
                name = path.relative_to(self.root).as_posix()
                files.append(ExtentFile(name, stat.st_size, stat.st_mtime))
        return files

    def head(self, name: str, nbytes: int) -> bytes:
        with (self.root / name).open("rb", buffering=0) as file:
            return file.read(nbytes)

    def read(self, name: str, offset: int, targets: Sequence[memoryview]) -> None:
        with (self.root / name).open("rb", buffering=0) as file:
            file.seek(offset)
            for target in targets:
                filled = 0
                while filled < len(target):
                    num = file.readinto(target[filled:])
                    if not num:
                        raise EOFError(name)
                    filled += num

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        path = self.root / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unique = f"{os.getpid()}-{threading.get_ident()}-{next(self._counter)}"
        temporary = path.with_name(f"{path.name}.{unique}{_TEMPORARY}")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                for part in parts:
                    written = 0
                    while written < len(part):
                        written += file.write(part[written:])
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def touch(self, name: str) -> None:
        with suppress(OSError):
            os.utime(self.root / name)

    def delete(self, name: str) -> None:
        with suppress(OSError):
            (self.root / name).unlink(missing_ok=True)

    def _remove_stale(self) -> None:
        for path in self.root.rglob(f"*{_TEMPORARY}"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_S:
                    path.unlink()
