"""The entry point: errors become one line and an exit code, help is short, shells complete."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ridgeline.cli import app as cli
from ridgeline.cli.main import main
from ridgeline.cli.params.click_command import debug_option
from ridgeline.config.commands import COMMANDS
from ridgeline.errors import BadInput, CannotRun, EngineUnavailable
from ridgeline.workflows.run_async import run_async


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """A command line that raises what the list holds."""
    errors: list[BaseException] = []

    def run() -> None:
        raise errors[0]

    monkeypatch.setattr(cli, "app", click.Command("run", params=[debug_option()], callback=run))
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
            "cannot use this path; got 'x.json': Permission denied; fix: name one",
        ),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/x"), 2, "'/proc/x'"),
        (OSError(errno.EIO, "Input/output error", "x.json"), 1, "the operating system reported"),
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


def test_sigterm_ends_a_command_in_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed: list[bool] = []

    def run() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            closed.append(True)

    monkeypatch.setattr(cli, "app", click.Command("run", params=[debug_option()], callback=run))
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)
    assert main([]) == 143
    monkeypatch.undo()
    signal.signal(signal.SIGTERM, before)
    assert closed and capsys.readouterr().err == "ridgeline: terminated\n"


@pytest.mark.parametrize("args", [["--debug"], []])
def test_debug_shows_the_traceback(raising: list[BaseException], args: list[str]) -> None:
    raising.append(BadInput("too big"))
    if args:
        with pytest.raises(BadInput):
            main(args)
    else:
        assert main(args) == 2


def ridgeline(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ridgeline", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3.5-27b", "gemma-4-26b-a4b", "kimi-k3"])
def test_inspect_knows_published_models_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those that the engine does not run; a local directory of the name comes first."""
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", name]) == 0
    out = capsys.readouterr().out.replace("\n", " ")
    assert "a published shape, without weights" in out
    assert (f"dummy:{name} has random ones" in out) == (name == "gemma-4-26b-a4b")
    (tmp_path / name).mkdir()
    assert main(["inspect", name]) == 2


@pytest.mark.parametrize("order", [["--debug", "inspect", "x"], ["inspect", "x", "--debug"]])
def test_debug_may_precede_or_follow_the_command(order: list[str]) -> None:
    done = ridgeline(*order)
    assert done.returncode != 0 and "Traceback" in done.stderr and "BadModel" in done.stderr


@pytest.mark.slow
def test_debug_after_two_dashes_is_an_argument() -> None:
    done = ridgeline("inspect", "--", "--debug")
    assert done.returncode == 2 and "'--debug'" in done.stderr and "Traceback" not in done.stderr


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert main(["--version"]) == 0
    first, second = capsys.readouterr().out.split()
    assert first == second


@pytest.mark.parametrize(
    ("args", "meant"),
    [
        (["serv"], "did you mean serve?"),
        (["bench", "--num-promts", "3"], "--num-prompts"),
        (["bench", "a", "b"], "unexpected"),
        (["top", "http://h:1"], "write --url http://h:1"),
        (["bench", "--num-prompts"], "requires an argument"),
    ],
)
def test_a_usage_error_is_one_line_with_a_suggestion(
    capsys: pytest.CaptureFixture[str], args: list[str], meant: str
) -> None:
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert meant in err and len(err.splitlines()) == 1 and not out


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "ridgeline optimize demo" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_root_help_has_a_whole_line_per_command(
    capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    assert main([flag]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for group in ("Run:", "Measure:", "Improve:", "Plan:", "Tools:"):
        assert group in lines
    for command in COMMANDS.values():
        assert any(line.split()[:1] == [command.name] and command.summary in line for line in lines)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_all_shows_every_option(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--help-all"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for option in COMMANDS[command].options.values():
        for flag in (option.flag,):
            assert flag in text.replace("\n", " ").replace("- ", "-") or flag in joined(text), flag


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_at_most_30_flags_and_names_the_rest(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, "-h"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert len(re.findall(r"^  (?:-\w, )?--\S+", text, re.M)) <= 30  # those of help among them
    options = COMMANDS[command].options.values()
    shown = [o for o in options if o.has_flag and re.search(rf"^  .*{o.flag}\b", text, re.M)]
    hidden = COMMANDS[command].hidden
    assert ("--help-all" in text) == bool(hidden)
    assert len(shown) >= sum(o.has_flag for o in options) - len(hidden)


def test_help_all_of_the_root_shows_every_option_of_every_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help-all"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for name, command in COMMANDS.items():
        own = text.partition(f"\nUsage: ridgeline {name} ")[2].partition("\nUsage: ")[0]
        assert all(option.flag in own for option in command.options.values()), name


def joined(text: str) -> str:
    """The text without the line breaks that fall within a flag."""
    return "".join(line.strip() for line in text.splitlines())


@pytest.mark.parametrize("args", [["bench", "--help"], ["models"]], ids=["print", "rich"])
def test_a_closed_pipe_ends_quietly(args: list[str]) -> None:
    """`ridgeline bench --help | head -1`."""
    command = [sys.executable, "-m", "ridgeline", *args]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")


def complete(words: str) -> list[str]:
    """What bash offers for the last of the words, by the generated script's protocol."""
    environ = os.environ | {
        "_RIDGELINE_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    command = [sys.executable, "-c", "import sys; from ridgeline.cli.main import main; main([])"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_the_shell_completes_commands_flags_and_choices() -> None:
    assert complete("ridgeline opt") == ["optimize"]
    assert complete("ridgeline serve --max-num-s") == ["--max-num-seqs"]
    assert complete("ridgeline serve --batching st") == ["static"]


def test_the_completion_script_is_one_that_bash_can_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert "_RIDGELINE_COMPLETE=bash_complete" in script and "complete -o nosort" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.slow
def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        command = [sys.executable, "-m", "ridgeline", "version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "disk is full" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("error", [CannotRun("interrupted early"), RuntimeError("a fault")])
def test_expected_error_of_a_terminated_workflow_is_not_logged(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def workflow() -> None:
        asyncio.get_running_loop().call_soon(exit_by_signal)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise error from None

    def exit_by_signal() -> None:
        raise SystemExit(143)

    with pytest.raises(SystemExit):
        run_async(workflow())
    assert ("unhandled exception" in caplog.text) is isinstance(error, RuntimeError)
