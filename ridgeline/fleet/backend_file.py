"""A file of backends, one URL per line, that may change while the gateway runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from ridgeline.errors import BadInput
from ridgeline.fleet.backends import Backends
from ridgeline.fleet.upstream import BackendAddress

log = logging.getLogger("ridgeline.fleet")
_POLL_S = 0.25


def read_backend_file(path: Path) -> list[BackendAddress]:
    """The addresses in the file; what follows a # is a comment. Raises BadInput."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--backend-file cannot be read: {error}", value=str(path)) from None
    urls = [line.partition("#")[0].strip() for line in text.splitlines()]
    return list(dict.fromkeys(BackendAddress.parse(url) for url in urls if url))


class BackendFile:
    """Keeps the backends as the file has them, next to `static` ones. A file that is not valid
    changes nothing."""

    def __init__(
        self, path: Path, backends: Backends, static: Sequence[BackendAddress] = ()
    ) -> None:
        self._path, self._backends, self._static = path, backends, static
        self._read: tuple[int, int] | None = self._version()

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(_POLL_S)
            version = self._version()
            if version is None or version == self._read:
                continue
            self._read = version
            try:
                self._backends.replace([*self._static, *read_backend_file(self._path)])
            except BadInput as error:
                log.error("%s", error)

    def _version(self) -> tuple[int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino
