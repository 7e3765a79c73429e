"""Nothing begins that could not be written at its end, and nothing that is read is written over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.cli.main import main
from ridgeline.cli.validate.output_paths import FILES, FOLDERS
from tests.cli.whole import NEEDED, SHAPE, options, refused

READ = {
    "config", "file", "ladder", "calibration", "catalogue", "prices", "models", "text", "a", "b",
    "run", "baseline", "nsight", "lm_eval_path",
}  # fmt: skip
"""Options that name what is read."""


def given(command: str, name: str, place: str) -> list[str]:
    """The command with this output, and with no other in its place."""
    needed = NEEDED.get(command, [])
    if name == "output" and "-o" in needed:
        needed = needed[: needed.index("-o")]
    return [command, *needed, f"--{name}", place]


OUTPUTS = [(command, name) for command, names in FILES.items() for name in names]
MADE = [(command, name) for command, names in FOLDERS.items() for name in names]


def test_every_path_is_read_or_looked_at() -> None:
    paths = {(command, name) for command, name, kind in options() if kind is Path}
    assert {*OUTPUTS, *MADE} <= paths
    assert {name for _, name in paths - {*OUTPUTS, *MADE}} <= READ


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(("command", "name"), OUTPUTS)
def test_a_file_that_cannot_be_written_is_refused_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, name: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    flag = f"--{name}"
    for place, named in (
        ("folder", " is a folder"),
        ("nowhere/x", ": no such folder"),
        ("file/x", ": no such folder"),
        ("/dev/null", " is no ordinary file"),
        ("/proc/x", " cannot be written"),
    ):
        refused(capsys, given(command, name, place), f"{flag}{named}")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(("command", "name"), MADE)
def test_so_is_a_folder_that_cannot_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, name: str
) -> None:
    (tmp_path / "file").write_text("mine")
    for place in ("file", "file/x", "/proc/x"):
        refused(capsys, given(command, name, place), f"--{name}")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    "args",
    [
        ["bench", "--json", "new", "--html", "new"],
        ["bench", "--workload", "mine", "--log", "mine"],
        ["bench", "--workload", "sharegpt:mine", "--log", "./mine"],
        ["diagnose", "--run", "mine", "--html", "mine"],
        ["predict", "--input", "mine", "--output", "mine"],
        ["plan", *SHAPE, "--catalogue", "mine", "--html", "mine"],
        ["simulate", *SHAPE, "--html", "new", "--trace", "./new"],
        ["batch", "mine", "--output", "mine"],
    ],
)
def test_no_two_files_are_one(
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
def test_calibrate_knows_its_last_run_before_it_measures_the_first(
    capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    """`--engine nosuch` measures the small model first."""
    refused(capsys, ["calibrate", *more], "nosuch")


@pytest.mark.usefixtures("no_work")
def test_what_cannot_be_trained_on_is_refused_before_anything_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "short.txt").write_text("short")
    train = ["train-drafter", "demo", "-o", "made", "--text"]
    refused(capsys, [*train, "nosuch.txt"], "nosuch.txt")
    refused(capsys, [*train, "short.txt", "--own-tokens", "1000"], "too short")


@pytest.mark.usefixtures("no_work")
def test_what_is_written_anew_is_written_whole(
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
