"""Run the README's tour again and put the real output in place of what stands there.

    python scripts/tour.py            every console block
    python scripts/tour.py doctor     only blocks whose command contains a word

A console block is a command behind `$` and its output. `ridgeline serve` stays up for the `curl`
block that follows it. Run it on a quiet machine: the figures become the README's.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(r"^```console\n\$ (?P<command>[^\n]*)\n(?P<output>.*?)^```", re.M | re.S)
READY = "is served at"


class Tour:
    """Runs commands in order; at most one server is up."""

    def __init__(self, wanted: list[str]) -> None:
        self._wanted = wanted
        self._server: subprocess.Popen[str] | None = None
        path = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
        self._env = {**os.environ, "PATH": path, "COLUMNS": "100"}

    def replay(self, block: re.Match[str]) -> str:
        """The block with fresh output; one that shows none, or is not wanted, as it is."""
        command = block["command"]
        serves = command.startswith("ridgeline serve")
        wanted = not self._wanted or any(word in command for word in self._wanted)
        if not block["output"].strip() or not wanted:
            return block[0]
        print(f"$ {command}", file=sys.stderr)
        text = self._serve(command) if serves else self._run(command)
        return f"```console\n$ {command}\n{tidy(text)}\n```"

    def stop(self) -> None:
        """End the server, if one is up."""
        if self._server is not None:
            self._server.send_signal(signal.SIGTERM)
            self._server.communicate()
            self._server = None

    def _run(self, command: str) -> str:
        if command.startswith("ridgeline"):
            self.stop()
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
        if "ridgeline optimize" in command:  # without the lines of progress
            return done.stdout.partition("\n\n")[2]
        return done.stdout

    def _serve(self, command: str) -> str:
        self.stop()
        self._server = subprocess.Popen(
            command.split(), cwd=ROOT, env=self._env, stderr=subprocess.PIPE, text=True
        )
        assert self._server.stderr is not None
        lines = []
        for line in self._server.stderr:
            lines.append(line)
            if READY in line:
                break
        return "".join(lines)


def tidy(text: str) -> str:
    """Without trailing blanks, and without the name of anybody's home."""
    home = str(Path.home())
    lines = [line.rstrip().replace(home, "~").replace(str(ROOT), ".") for line in text.splitlines()]
    return "\n".join(lines).strip("\n")


def main() -> None:
    tour = Tour(sys.argv[1:])
    try:
        fresh = BLOCK.sub(tour.replay, README.read_text(encoding="utf-8"))
    finally:
        tour.stop()
    README.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    assert shutil.which("bash")
    main()
