"""Arguments that are wrong whatever the model is are reported before a model is downloaded."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ridgeline.cli.main import main
from ridgeline.hub import download

HUB_MODEL = "owner/never-downloaded"


@pytest.fixture(autouse=True)
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **keywords: object) -> None:
        raise AssertionError("a model was downloaded before the arguments were checked")

    monkeypatch.setattr(download, "download", refuse)


@pytest.fixture
def full(tmp_path: Path) -> str:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    return str(tmp_path / "full")


def test_quantize_checks_output_recipe_and_text(
    full: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert main(["quantize", HUB_MODEL, "-o", full]) != 0
    assert main(["quantize", HUB_MODEL, "-o", out, "--method", "rtn", "--steps", "3"]) != 0
    assert main(["quantize", HUB_MODEL, "-o", out, "--calibration-text", f"{full}/no"]) != 0
    assert "Traceback" not in capsys.readouterr().err


def test_train_drafter_checks_output_and_text(
    full: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train-drafter", HUB_MODEL, "-o", full]) != 0
    assert main(["train-drafter", HUB_MODEL, "-o", f"{tmp_path}/o", "--text", f"{full}/no"]) != 0
    err = capsys.readouterr().err
    assert "not empty" in err and "calibration text" in err


def test_prune_checks_output_text_and_choices(
    full: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prune = ["prune", HUB_MODEL, "--drop-layers", "1"]
    assert main([*prune, "-o", full]) != 0
    assert main([*prune, "-o", f"{tmp_path}/o", "--calibration-text", f"{full}/no"]) != 0
    assert main(["prune", HUB_MODEL, "-o", f"{tmp_path}/o"]) != 0
    err = capsys.readouterr().err
    assert "not an empty directory" in err and "calibration text" in err
    assert "nothing to remove" in err


def test_distill_checks_output_text_and_models(
    full: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    distill = ["distill", "--teacher", HUB_MODEL, "--student", "demo", "-o"]
    assert main([*distill, full]) != 0
    assert main([*distill, f"{tmp_path}/o", "--text", f"{full}/no"]) != 0
    assert main(["distill", "--teacher", HUB_MODEL, "-o", f"{tmp_path}/o"]) != 0
    err = capsys.readouterr().err
    assert "not an empty directory" in err and "calibration text" in err
    assert "a student is needed" in err


def test_serve_checks_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", HUB_MODEL, "--port", port]) != 0
    assert port in capsys.readouterr().err


def test_generate_checks_its_sampling(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", HUB_MODEL, "hi", "--top-p", "2"]) != 0
    assert "top" in capsys.readouterr().err
