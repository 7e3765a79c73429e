"""A `ridgeline serve` process for the heavy checks in this folder, and its counters."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

PAGE_BYTES = 4096


@dataclass(frozen=True)
class Served:
    """A running server: its two addresses and its process."""

    url: str
    admin_url: str
    process: subprocess.Popen[bytes]

    def counters(self) -> dict[str, float]:
        """The engine's own, from the operators' listener."""
        counters = httpx.get(f"{self.admin_url}/admin/state", timeout=120).json()["counters"]
        return {name: float(value) for name, value in counters.items()}

    def metrics(self) -> dict[str, float]:
        """/metrics by name and labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def rss_bytes(self) -> int:
        statm = Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii")
        return int(statm.split()[1]) * PAGE_BYTES

    def num_files(self) -> int:
        """Open file descriptors."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def settle(self, within_s: float = 60.0) -> None:
        """Until nothing runs and nothing waits."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            now = self.counters()
            if not (now["num_requests_running"] or now["num_queued"]):
                return
            time.sleep(0.05)
        raise TimeoutError(f"still busy: {self.counters()}")


@contextlib.contextmanager
def serving(model: str, *flags: str, admin: bool = True) -> Iterator[Served]:
    """A server over `model` on free ports; stopped politely, which must end with 0."""
    port = _free_port()
    command = [sys.executable, "-m", "ridgeline", "serve", model, "--port", "0", *flags]
    command += ["--admin-port", str(port)] if admin else []
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log)
        try:
            url = _wait_for_url(process, Path(log.name))
            yield Served(url, f"http://127.0.0.1:{port}", process)
            process.send_signal(signal.SIGTERM)
            if process.wait(timeout=60):
                raise RuntimeError(f"the server ended with {process.returncode}")
        finally:
            process.kill()
            process.wait()


def _wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"served at (http://\S+)/v1", log.read_text(encoding="utf-8"))
        if found:
            return found[1]
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start: {log.read_text(encoding='utf-8')}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
