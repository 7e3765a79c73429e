"""The secret that separates tenants in stored blocks, kept with them.

A server salts the block digests of its tenants with a secret, so that none can guess another's.
Without tiers it draws a new one at every start; blocks that outlive the process need one that does.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from ridgeline.errors import CannotRun

NAME = "tenant-secret"
NUM_BYTES = 32


def tenant_secret(directory: str | None, url: str | None) -> bytes | None:
    """The secret of the tiers, created on first use; None without any that outlive the process.

    Raises CannotRun if it cannot be read.
    """
    if directory is not None:
        return _checked(_secret_in(Path(directory)), directory)
    if url is not None:
        return _checked(_secret_at(url), url)
    return None


def _secret_in(directory: Path) -> bytes:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / NAME
    if not path.exists():
        # Complete before it has its name: another process may read it at once.
        temporary = path.with_name(f"{NAME}.{os.getpid()}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(NUM_BYTES))
        with suppress(FileExistsError):
            os.link(temporary, path)
        temporary.unlink()
    return path.read_bytes()


def _secret_at(url: str) -> bytes:
    from fsspec.core import url_to_fs

    files, root = url_to_fs(url)
    path = f"{str(root).rstrip('/')}/{NAME}"
    if not files.exists(path):
        files.pipe_file(path, secrets.token_bytes(NUM_BYTES))
    return bytes(files.cat_file(path))


def _checked(secret: bytes, place: str) -> bytes:
    if len(secret) != NUM_BYTES:
        raise CannotRun(
            f"the file {NAME} of the KV tiers is damaged",
            value=place,
            fix="remove it: blocks of tenants with keys are then computed again",
        )
    return secret
