"""The servers of a fleet on Ray, as their supervisors report them, in a file for the gateway."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ridgeline.errors import DECODE_ERRORS

_LOG = logging.getLogger(__name__)

LOST_AFTER_S = 60.0
"""Time without a word from its supervisor after which a server is asked itself."""


class ServerEntry(msgspec.Struct, kw_only=True):
    """A server of the fleet, as `ridgeline fleet status` shows it."""

    replica: str
    model: str
    url: str
    pid: int
    seen_s: float = 0.0
    is_ready: bool = False


class ServerTable:
    """Servers by their replica in Ray Serve. Every change rewrites `file`, one URL per line, and a
    file next to it from which a table that comes after this one knows the same servers.

    `answers`: whether the server at a URL says that it is ready. A server leaves the table when its
    supervisor says so, or is not heard of and the server does not answer: on a busy machine, Ray
    may ask supervisors too rarely although their servers work.
    """

    def __init__(
        self,
        file: Path,
        answers: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file, self._answers, self._clock = file, answers, clock
        self._state_file = file.with_suffix(".json")
        self._servers = self._known_before()
        self._left = set[str]()
        self._lock = threading.Lock()
        self._write()

    def entries(self) -> list[ServerEntry]:
        """Copies of the entries."""
        with self._lock:
            return [msgspec.structs.replace(entry) for entry in self._servers.values()]

    def note(self, replica: str, model: str, url: str, pid: int) -> None:
        """The supervisor of a server has found it running."""
        with self._lock:
            if replica in self._left:  # said before it left, and come late
                return
            known = self._servers.get(replica)
            if known is not None:
                known.seen_s = self._clock()
                return
            self._servers[replica] = ServerEntry(
                replica=replica, model=model, url=url, pid=pid, seen_s=self._clock()
            )
            self._write()

    def remove(self, replica: str) -> None:
        """The server is about to stop: it gets no more requests."""
        with self._lock:
            self._left.add(replica)
            if self._servers.pop(replica, None) is not None:
                self._write()

    def forget_lost(self) -> None:
        """Drop the servers that neither their supervisors nor they themselves vouch for."""
        lost_s = self._clock() - LOST_AFTER_S
        for entry in self.entries():
            if entry.seen_s >= lost_s:
                continue
            if self._answers(entry.url):
                self.note(entry.replica, entry.model, entry.url, entry.pid)
                continue
            with self._lock:
                known = self._servers.get(entry.replica)
                if known is not None and known.seen_s == entry.seen_s:
                    del self._servers[entry.replica]
                    self._write()

    def _known_before(self) -> dict[str, ServerEntry]:
        """The servers of the table before this one; their supervisors may speak up from now on."""
        if not self._state_file.exists():
            return {}
        try:
            entries = msgspec.json.decode(self._state_file.read_bytes(), type=list[ServerEntry])
        except (OSError, *DECODE_ERRORS) as error:
            _LOG.warning("the servers of before are unknown: %s: %s", self._state_file, error)
            return {}
        for entry in entries:
            entry.seen_s = self._clock()
        return {entry.replica: entry for entry in entries}

    def _write(self) -> None:
        entries = list(self._servers.values())
        replace_file(self._state_file, msgspec.json.encode(entries))
        replace_file(self._file, "".join(f"{entry.url}\n" for entry in entries).encode())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file of which no reader sees half."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    part.replace(path)
