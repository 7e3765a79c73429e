"""`ridgeline optimize`: what is wrong is said at once, before anything is probed or loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.cli.main import main


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--slo", "ttft=200"], "ttft=200"),
        (["--slo", "ttft:fast"], "ttft:fast"),
        (["--slo", "error:1%"], "has no latency limit"),
        (["--slo", "ttft:-5"], "ttft:-5"),
        (["--workload", "nonsense"], "nonsense"),
        (["--workload", "no/such/file.jsonl"], "no/such/file.jsonl"),
        (["--objective", "speed"], "--objective"),
        (["--budget", "soon"], "--budget"),
        (["--batching", "static"], "--batching"),
        (["--price-per-hour", "cheap"], "--price-per-hour"),
    ],
)
def test_bad_optimize_flags_are_reported(
    capsys: pytest.CaptureFixture[str], args: list[str], named: str
) -> None:
    assert main(["optimize", "demo", *args]) == 2
    err = capsys.readouterr().err
    assert named in err and "Traceback" not in err, err


def test_an_output_that_is_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "report"
    file.write_text("mine")
    assert main(["optimize", "demo", "-o", str(file)]) in (1, 2)
    assert "report" in capsys.readouterr().err and file.read_text() == "mine"


def test_inputs_are_not_overwritten(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The settings found last time, given back with the same folder."""
    config = tmp_path / "ridgeline.toml"
    text = '[engine]\nmodel = "demo"\n'
    config.write_text(text)
    assert main(["optimize", "--config", str(config), "-o", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "ridgeline.toml" in err and "--output" in err, err
    assert config.read_text() == text and list(tmp_path.iterdir()) == [config]
