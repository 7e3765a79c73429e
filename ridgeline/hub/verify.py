"""Copy or check a file by its SHA-256."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import IO

_CHUNK_BYTES = 1 << 20


def copy_hashed(source: IO[bytes], target: IO[bytes]) -> str:
    """Copy `source` to its end; returns the SHA-256 of the content."""
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        target.write(chunk)
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
