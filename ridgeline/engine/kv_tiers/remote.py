"""Extents in an object store, by any URL that fsspec knows: s3://, gs://, az://, memory://, …

Each protocol needs its own package (s3fs, gcsfs, adlfs); nothing is imported without a URL. Objects
are not removed to keep a size: an object store is shared, and its lifecycle rules are the place for
that.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from ridgeline.engine.kv_tiers.base import ExtentFile
from ridgeline.errors import CannotRun


class RemoteExtents:
    """Objects below a URL. Raises CannotRun where the protocol's package is missing."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs

            self._fs, self._root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise CannotRun(
                "the protocol of --kv-tier-url is not available",
                value=url,
                fix=f"install its package: {error}",
            ) from None
        self._root = str(self._root).rstrip("/")

    def list(self) -> list[ExtentFile]:
        try:
            self._fs.invalidate_cache()
            found = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return []
        return [
            ExtentFile(path.removeprefix(self._root).lstrip("/"), int(info["size"]), _time_of(info))
            for path, info in found.items()
            if path.endswith(".kv")
        ]

    def head(self, name: str, nbytes: int) -> bytes:
        return bytes(self._fs.cat_file(f"{self._root}/{name}", start=0, end=nbytes))

    def read(self, name: str, offset: int, targets: Sequence[memoryview]) -> None:
        end = offset + sum(map(len, targets))
        data = io.BytesIO(self._fs.cat_file(f"{self._root}/{name}", start=offset, end=end))
        for target in targets:
            if data.readinto(target) != len(target):
                raise EOFError(name)

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        path = f"{self._root}/{name}"
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(path, b"".join(parts))

    def touch(self, name: str) -> None:
        """Object stores record no use."""

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{name}")


def _time_of(info: dict[str, Any]) -> float:
    for key in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = info.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0
