"""Output paths are checked before any work, and no input is overwritten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.cli.main import main
from ridgeline.config.option import Option
from tests.cli.command_line import NEEDED, SHAPE, options, refused

FILES = [(command, option) for command, option in options() if option.about.path == "file"]
PARTNERS = {"canary_state": ["--canary", "http://127.0.0.1:9"]}
"""What an option needs in order to have an effect."""

FOLDERS = [(command, option) for command, option in options() if option.about.path == "folder"]


def given(command: str, option: Option, place: str) -> list[str]:
    """The command with this output, and with no other in its place."""
    needed = NEEDED.get(command, [])
    if option.name == "output" and "-o" in needed:
        needed = needed[: needed.index("-o")]
    if command == "predict":
        needed = ["--input", "-"]
    return [command, *needed, *PARTNERS.get(option.name, []), option.flag, place]


def test_every_path_is_an_input_or_an_output() -> None:
    for command, option in options():
        if option.type is Path:
            assert option.about.path is not None, f"{command} {option.flag}"
    assert len(FILES) > 8 and len(FOLDERS) > 3


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(("command", "option"), FILES)
def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, option: Option
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    flag = option.flag
    for place, named in (
        ("folder", " is a folder"),
        ("nowhere/x", ": no such folder"),
        ("file/x", ": no such folder"),
        ("/dev/null", " is not a regular file"),
        ("/proc/x", " cannot be written"),
    ):
        refused(capsys, given(command, option, place), f"{flag}{named}")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(("command", "option"), FOLDERS)
def test_a_folder_that_cannot_be_created_is_refused_before_any_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, option: Option
) -> None:
    (tmp_path / "file").write_text("mine")
    for place in ("file", "file/x", "/proc/x"):
        refused(capsys, given(command, option, place), option.flag)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    "args",
    [
        ["bench", "--output-json", "new", "--html", "new"],
        ["bench", "--workload", "mine", "--log", "mine"],
        ["bench", "--workload", "sharegpt:mine", "--log", "./mine"],
        ["diagnose", "--run", "mine", "--html", "mine"],
        ["predict", "--input", "mine", "--output", "mine"],
        ["plan", SHAPE[0], "--catalogue", "mine", "--html", "mine"],
        ["simulate", *SHAPE, "--html", "new", "--trace", "./new"],
        ["batch", "mine", "--output", "mine"],
    ],
)
def test_an_output_may_not_be_an_input_or_another_output(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, args: list[str]
) -> None:
    (tmp_path / "mine").write_text("mine")
    refused(capsys, args, args[-2])
    assert (tmp_path / "mine").read_text() == "mine" and not (tmp_path / "new").exists()


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    "more",
    [["--engine", "nosuch"], ["--engine", "demo", "--also", "demo=int8", "--also", "nosuch=int8"]],
)
def test_calibrate_checks_all_runs_before_the_first(
    capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    """`--engine nosuch` measures the small model first."""
    refused(capsys, ["calibrate", *more], "nosuch")


@pytest.mark.usefixtures("no_work")
def test_text_that_cannot_be_trained_on_is_refused_before_any_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "short.txt").write_text("short")
    train = ["train-drafter", "demo", "-o", "made", "--text"]
    refused(capsys, [*train, "nosuch.txt"], "nosuch.txt")
    refused(capsys, [*train, "short.txt", "--own-tokens", "1000"], "too short")


@pytest.mark.usefixtures("no_work")
def test_a_failed_run_leaves_the_earlier_output(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What an earlier run left stays until the new one is complete."""
    output = tmp_path / "out.jsonl"
    output.write_text("earlier")
    assert main(["predict", "--input", "nosuch.jsonl", "--output", str(output)]) == 2
    assert output.read_text() == "earlier"
    point = {"model": "llama-3.1-8b", "device": "h100-sxm", "isl": 64, "osl": 64, "batch": 1}
    (tmp_path / "points.jsonl").write_text(json.dumps(point) + "\n")
    assert main(["predict", "--input", "points.jsonl", "--output", str(output)]) == 0
    assert output.read_text().count("\n") == 1 and not capsys.readouterr().out
