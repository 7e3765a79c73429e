"""`ridgeline bench`: a bad option is one line, a run writes the keys of vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.cli.commands.measure import bench as command
from ridgeline.cli.main import main
from ridgeline.config.load import BenchOptions, BenchReport
from ridgeline.config.settings import Settings


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--url", "http://127.0.0.1:9", "--dtype", "float32"], "--dtype"),
        (["demo", "--url", "http://127.0.0.1:9"], "MODEL"),
        (["--endpoint", "chat"], "--endpoint"),
        (["--served-model-name", "x"], "--served-model-name"),
        (["demo", "--model", "demo"], "--model"),
        (["--url", "http://h", "--model", "a", "--served-model-name", "b"], "--model"),
        (["--endpoint", "smoke", "--url", "http://127.0.0.1:9"], "--endpoint"),
        (["--workload", "nonsense"], "nonsense"),
        (["--workload", "synthetic:input=x"], "synthetic"),
        (["--slo", "ttft=200"], "ttft=200"),
        (["--slo", "ttft:nan"], "ttft:nan"),
        (["--percentile-metrics", "speed"], "speed"),
        (["--metric-percentiles", "101"], "101"),
        (["--request-rate", "0"], "rate"),
        (["--num-prompts", "0"], "0"),
        (["--output-json", "no/such/folder/x.json"], "no/such/folder"),
    ],
)
def test_bad_bench_flags_are_reported(
    capsys: pytest.CaptureFixture[str], args: list[str], named: str
) -> None:
    assert main(["bench", *args]) == 2
    err = capsys.readouterr().err
    assert named in err and len(err.splitlines()) == 1, err


class Measured:
    """A result with a file to write and text to print."""

    def save_log(self, path: Path) -> None:
        path.touch()

    def to_html(self) -> str:
        return "<p>measured</p>"


def test_files_are_written_before_the_output_that_a_closed_pipe_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ridgeline bench --log run.jsonl | head -5` keeps the run."""

    def no_reader(*args: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(command, "bench", lambda *args, **kwargs: Measured())
    monkeypatch.setattr(command, "print_bench", no_reader)
    report = BenchReport(log=tmp_path / "run.jsonl", html=tmp_path / "run.html")
    with pytest.raises(BrokenPipeError):
        command.run_bench(BenchOptions(), Settings(model="demo"), report)
    assert report.log is not None and report.log.exists()
    assert report.html is not None and "measured" in report.html.read_text()


@pytest.mark.slow
def test_result_file_has_the_keys_of_vllm(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    args = [
        "bench",
        "--model",
        "demo",
        "--num-prompts",
        "3",
        "--num-warmups",
        "1",
        "--max-concurrency",
        "2",
    ]
    load = ["--input-len", "8", "--output-len", "4"]
    file = tmp_path / "result.json"
    memory = ["--kv-cache-memory-bytes", "32MiB"]
    assert main([*args, *load, *memory, "--output-json", str(file)]) == 0
    assert "ttft" in capsys.readouterr().out
    result = json.loads(file.read_text())
    assert result["completed"] == 3 and result["total_output_tokens"] == 12
