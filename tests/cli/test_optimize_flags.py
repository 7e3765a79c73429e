"""`ridgeline optimize`: what is wrong is said at once, before anything is probed or loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.cli.main import main
from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.commands import COMMANDS
from ridgeline.config.improve import OptimizeOptions
from ridgeline.config.settings import Settings
from ridgeline.workflows.optimize.optimize import job_of


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
        (["--price-per-hour", "cheap"], "--price-per-hour"),
    ],
)
def test_bad_optimize_flags_are_reported(
    capsys: pytest.CaptureFixture[str], args: list[str], named: str
) -> None:
    assert main(["optimize", "demo", *args]) == 2
    err = capsys.readouterr().err
    assert named in err and "Traceback" not in err, err


def test_hopeless_budget_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeline.workflows.optimize.optimize.probe", pytest.fail)
    assert main(["optimize", "demo", "--budget", "20s"]) == 2
    err = capsys.readouterr().err
    assert "budget is too small" in err and "20 s" in err, err


def test_given_settings_are_the_baseline_and_the_defaults_a_rival(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[engine]\nmodel = "demo"\nmax_num_seqs = 64\nenable_prefix_caching = false\n')
    call = Invocation(
        COMMANDS["optimize"], {"config": file, "batching": "dynamic", "dtype": "bfloat16"}, {}
    )
    job = job_of(call.engine_settings(None), call.read(OptimizeOptions))
    assert (job.settings.max_num_seqs, job.settings.batching) == (64, "dynamic")
    assert not job.settings.enable_prefix_caching
    assert job.defaults == Settings(model="demo", dtype="bfloat16")


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
