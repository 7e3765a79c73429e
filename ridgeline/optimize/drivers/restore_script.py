"""A script that restores what was there before, run by a watchdog if Ridgeline is killed.

The watchdog is a shell that waits for a line on a pipe. If this process ends without writing it
(kill -9, out of memory), the pipe closes and the shell runs the script. The script stays in the
folder of the results for the case that the whole machine goes down.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

RESTORE_SCRIPT = "restore.sh"
_WATCH = 'read word || { [ -f "$0" ] && exec sh "$0"; }'


class RestoreScript:
    """The script at `path`; it exists while there is something to restore."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._watchdog: subprocess.Popen[bytes] | None = None

    def write(self, lines: Sequence[str]) -> None:
        """Replace its commands, and start the watchdog if there is none."""
        text = "\n".join(("#!/bin/sh", "# Undoes what `ridgeline optimize` changed.", *lines, ""))
        draft = self.path.with_suffix(".tmp")
        draft.write_text(text, encoding="utf-8")
        draft.replace(self.path)
        if self._watchdog is None:
            self._watchdog = subprocess.Popen(
                ["/bin/sh", "-c", _WATCH, str(self.path.absolute())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def remove(self) -> None:
        """Everything is restored: the script and its watchdog are not needed."""
        self.path.unlink(missing_ok=True)
        self.dismiss()

    def dismiss(self) -> None:
        """End the watchdog and leave the script to the user."""
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.communicate(b"done\n")
