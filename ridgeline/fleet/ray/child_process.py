"""A `ridgeline` process that ends with the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ridgeline.http_replies import open_reply

_PR_SET_PDEATHSIG = 1
_LOG_TAIL_BYTES = 2000
_PATIENCE_S = 30.0  # with a process that has accepted a connection


class ChildProcess:
    """Runs `python -m ridgeline ARGUMENTS`; its output goes to a file next to Ray's logs.

    If the process that started it is killed, it gets SIGTERM, and may finish what it has begun.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        handle, name = tempfile.mkstemp(prefix="ridgeline-", suffix=".log")
        self._log = Path(name)
        parent = os.getpid()
        libc = ctypes.CDLL(None)

        def end_with_parent() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # it has ended between the fork and this line
                os._exit(1)

        command = [sys.executable, "-m", "ridgeline", *arguments]
        try:
            self._process = subprocess.Popen(
                command,
                stdout=handle,
                stderr=handle,
                preexec_fn=end_with_parent,
                start_new_session=True,  # Ray kills the process group of an actor that has ended
            )
        finally:
            os.close(handle)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, url: str, timeout_s: float) -> None:
        """Wait until it serves. Raises RuntimeError with the end of its output if it ends."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if not self.is_running:
                raise RuntimeError(f"the server has ended: {self.log_tail()}")
            if is_ready(url, _PATIENCE_S):
                return
            time.sleep(0.2)
        raise RuntimeError(f"the server is not ready after {timeout_s:g} s: {self.log_tail()}")

    def stop(self, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL for one that does not end in time."""
        if self.is_running:
            self._process.terminate()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.unlink(missing_ok=True)

    def log_tail(self) -> str:
        return self._log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()


def is_ready(url: str, timeout_s: float = 2.0) -> bool:
    """Whether `/ready` answers 200."""
    try:
        with open_reply(f"{url}/ready", timeout_s) as response:
            return bool(response.status == 200)
    except (OSError, ValueError):
        return False


def free_port(host: str) -> int:
    """A port that nothing uses now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        return int(listener.getsockname()[1])


def url_of(host: str, port: int) -> str:
    """The URL of a server that listens on the address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
