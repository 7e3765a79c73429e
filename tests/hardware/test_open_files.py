"""Connections end where the system's limit of open files would: refused, not lost in tracebacks."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from ridgeline.errors import BadInput
from ridgeline.hardware import open_files
from ridgeline.hardware.open_files import RESERVED, connections_that_fit, raise_limit


class Limits:
    """A process with these limits."""

    def __init__(self, soft: int, hard: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.soft, self.hard = soft, hard
        monkeypatch.setattr(open_files.resource, "getrlimit", lambda what: (self.soft, self.hard))
        monkeypatch.setattr(open_files.resource, "setrlimit", self.set)

    def set(self, what: int, limits: tuple[int, int]) -> None:
        assert limits[0] <= limits[1] == self.hard or self.hard == resource.RLIM_INFINITY
        self.soft = limits[0]


@pytest.mark.parametrize(
    ("soft", "hard", "files_each", "soft_then", "fitting"),
    [
        (1024, 1 << 20, 1, 4096 + RESERVED, 4096),
        (1024, 1 << 20, 2, 8192 + RESERVED, 4096),
        (1024, resource.RLIM_INFINITY, 1, 4096 + RESERVED, 4096),
        (1024, 1024, 1, 1024, 1024 - RESERVED),
        (1024, 2048, 2, 2048, (2048 - RESERVED) // 2),
        (1 << 20, 1 << 20, 1, 1 << 20, 4096),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1, resource.RLIM_INFINITY, 4096),
    ],
)
def test_limit_is_raised_as_far_as_it_may_be(
    soft: int,
    hard: int,
    files_each: int,
    soft_then: int,
    fitting: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = Limits(soft, hard, monkeypatch)
    raise_limit(4096, files_each)
    assert limits.soft == soft_then
    assert connections_that_fit(4096, files_each) == fitting
    assert ("at most" in caplog.text) == (fitting < 4096)


def test_few_connections_need_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(RESERVED + 2, RESERVED + 2, monkeypatch)
    raise_limit(2)
    assert connections_that_fit(2) == 2 and limits.soft == RESERVED + 2
    with pytest.raises(BadInput, match=f"at least {RESERVED + 3}"):
        raise_limit(3)


def test_server_with_too_few_files_says_so_before_it_loads_a_model() -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "from ridgeline.cli.main import main\n"
        "sys.exit(main(['serve', 'demo', '--port', '0']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "got 'ulimit -n 64'" in ended.stderr and "LimitNOFILE=" in ended.stderr
