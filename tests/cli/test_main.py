"""The entry point: errors become one line and an exit code; --debug brings the traceback."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest
import typer

from ridgeline.cli import app as commands
from ridgeline.cli.main import main
from ridgeline.errors import BadInput, EngineUnavailable


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """An app whose only command raises what the list holds."""
    errors: list[BaseException] = []
    app = typer.Typer()

    @app.command()
    def run() -> None:
        raise errors[0]

    monkeypatch.setattr(commands, "app", app)
    return errors


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            BadInput("too big", value=9, limit=8, fix="less"),
            2,
            "too big; got 9; limit: 8; fix: less",
        ),
        (EngineUnavailable("stopped"), 1, "stopped"),
        (OSError(errno.ENOSPC, "No space left on device", "report.html"), 1, "the disk is full"),
        (
            PermissionError(errno.EACCES, "Permission denied", "x.json"),
            2,
            "the path cannot be used; got 'x.json': Permission denied; fix: name one",
        ),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/x"), 2, "'/proc/x'"),
        (OSError(errno.EIO, "Input/output error", "x.json"), 1, "the system refused"),
        (RuntimeError("oops"), 1, "internal error: RuntimeError: oops"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_lines(
    raising: list[BaseException],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    said: str,
) -> None:
    raising.append(error)
    assert main([]) == code
    out, err = capsys.readouterr()
    assert said in err and "Traceback" not in err and out == ""
    assert len(err.splitlines()) <= 1


@pytest.mark.parametrize("args", [["--debug"], []])
def test_debug_lets_the_traceback_through(raising: list[BaseException], args: list[str]) -> None:
    raising.append(BadInput("too big"))
    if args:
        with pytest.raises(BadInput):
            main(args)
    else:
        assert main(args) == 2


def ridgeline(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ridgeline", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("order", [["--debug", "inspect", "x"], ["inspect", "x", "--debug"]])
def test_debug_may_stand_before_or_after(order: list[str]) -> None:
    done = ridgeline(*order)
    assert done.returncode != 0 and "Traceback" in done.stderr and "BadModel" in done.stderr


def test_after_two_dashes_debug_is_a_word() -> None:
    done = ridgeline("inspect", "--", "--debug")
    assert done.returncode == 2 and "'--debug'" in done.stderr and "Traceback" not in done.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert main(["--version"]) == 0
    first, second = capsys.readouterr().out.split()
    assert first == second


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serv"]) == 2
    assert "serve" in capsys.readouterr().err


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        command = [sys.executable, "-m", "ridgeline", "version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "disk is full" in done.stderr and len(done.stderr.splitlines()) == 1
