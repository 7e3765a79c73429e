"""A file of backends, one URL per line, that may change while the gateway runs."""

from __future__ import annotations

import logging
from pathlib import Path

from ridgeline.errors import BadInput
from ridgeline.fleet.upstream import BackendAddress

log = logging.getLogger("ridgeline.fleet")


class BackendFile:
    """The addresses in a file; what follows a # is a comment. Raises BadInput for a file that is
    not valid at the start; later, such a file changes nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.addresses = self._addresses()
        self._read = self._version()

    async def refresh(self, now_s: float) -> None:
        """Read it again if it has changed."""
        version = self._version()
        if version is None or version == self._read:
            return
        self._read = version
        try:
            self.addresses = self._addresses()
        except BadInput as error:
            log.error("%s", error)

    def _addresses(self) -> list[BackendAddress]:
        try:
            text = self._path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            what = f"--backend-file cannot be read: {error}"
            raise BadInput(what, value=str(self._path)) from None
        urls = [line.partition("#")[0].strip() for line in text.splitlines()]
        return list(dict.fromkeys(BackendAddress.parse(url) for url in urls if url))

    def _version(self) -> tuple[int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino
