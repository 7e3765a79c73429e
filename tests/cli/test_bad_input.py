"""Bad models, prompts and numbers on the command line: one line, exit code 2, no traceback."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from ridgeline.cli.main import main


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that a test may turn into a bad model."""
    return tmp_path / "model"


def refused(capsys: pytest.CaptureFixture[str], args: Sequence[str], *named: str) -> None:
    code = main(args)
    out, err = capsys.readouterr()
    assert code == 2, err
    lines = [line for line in err.splitlines() if not line.startswith("loading ")]
    assert "Traceback" not in err and len(lines) == 1, err
    assert all(word in err for word in named), err
    assert out == ""


COMMANDS = [["inspect"], ["generate", "--max-tokens", "4"], ["serve", "--port", "0"]]


def with_model(command: Sequence[str], model: object) -> list[str]:
    extra = ["x"] if command[0] == "generate" else []
    return [command[0], str(model), *extra, *command[1:]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_missing_directory_is_reported(
    capsys: pytest.CaptureFixture[str], model: Path, command: list[str]
) -> None:
    refused(capsys, with_model(command, model), "no such model", "fix:")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_directory_without_a_model_is_reported(
    capsys: pytest.CaptureFixture[str], model: Path, command: list[str]
) -> None:
    model.mkdir()
    (model / "notes.txt").write_text("hello")
    refused(capsys, with_model(command, model), "config.json")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_unsupported_architecture_is_reported(
    capsys: pytest.CaptureFixture[str], model: Path, command: list[str]
) -> None:
    model.mkdir()
    config = {"architectures": ["BertForMaskedLM"], "model_type": "bert"}
    (model / "config.json").write_text(json.dumps(config))
    refused(capsys, with_model(command, model), "ert")


def test_file_that_is_no_model_is_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    refused(capsys, ["inspect", str(file)], "GGUF")


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--max-tokens", "0"], "--max-tokens"),
        (["--temperature", "nan"], "--temperature"),
        (["--temperature", "-1"], "--temperature"),
        (["--top-p", "2"], "--top-p"),
        (["--stop", ""], "stop"),
    ],
)
def test_bad_sampling_flags_are_reported(
    capsys: pytest.CaptureFixture[str], args: list[str], named: str
) -> None:
    refused(capsys, ["generate", "demo", "x", *args], named)


def test_empty_prompt_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, ["generate", "demo", ""], "prompt", "empty")


def test_prompt_beyond_the_context_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, ["generate", "demo", "x = 1\n" * 3000], "2048")


def test_kv_budget_below_one_sequence_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """Says where the memory goes, as a table, and what would do."""
    assert main(["generate", "demo", "x", "--kv-cache-memory-bytes", "64KiB"]) == 2
    err = capsys.readouterr().err
    assert "KV per token" in err and "fix:" in err and "Traceback" not in err


@pytest.mark.parametrize("flag", ["--num-threads", "--num-threads-decode"])
def test_more_threads_than_any_machine_has_are_refused(
    capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    refused(capsys, ["generate", "demo", "x", flag, "100000000"], flag, "100000000", "1,024")
