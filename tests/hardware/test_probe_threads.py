"""Probes where the system gives no more threads."""

from __future__ import annotations

import subprocess
import sys

from ridgeline.hardware.measure import native

PROBE = """
import resource
from ridgeline.errors import CannotRun
from ridgeline.hardware.measure import multiply_peak
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20),) * 2)  # a stack takes 8 MiB
try:
    multiply_peak("float32", 64)
except CannotRun as error:
    print(error)
print(multiply_peak("float32", 1).per_s > 0)
"""


def test_probe_without_enough_threads_is_an_error_and_does_not_end_the_process() -> None:
    """`terminate called without an active exception` was all that was printed."""
    assert native()
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    error, works = done.stdout.splitlines()
    assert "cannot start 64 threads" in error and "fix:" in error
    assert works == "True"
