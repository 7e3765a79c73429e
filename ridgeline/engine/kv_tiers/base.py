"""Where extents are kept: the interface of a directory and of an object store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class ExtentFile(NamedTuple):
    """A file: its name below the root, its size in bytes, and when it was last used."""

    name: str
    size: int
    used_s: float


class ExtentFiles(Protocol):
    """Immutable files by name. Methods raise OSError; a reader may lose a file at any time."""

    def list(self) -> list[ExtentFile]:
        """All extents, those of other models included."""
        ...

    def head(self, name: str, nbytes: int) -> bytes:
        """The first bytes of a file."""
        ...

    def read(self, name: str, offset: int, targets: Sequence[memoryview]) -> None:
        """Fill the buffers with what follows `offset`. Raises EOFError if the file ends earlier."""
        ...

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Create a file, so that it has either all of the content or does not exist."""
        ...

    def touch(self, name: str) -> None:
        """Note that a file was used now."""
        ...

    def delete(self, name: str) -> None:
        """Remove a file; does nothing if another process has."""
        ...
