"""`ridgeline bench`: its flags are those of its options, and none is dropped in silence."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from ridgeline.cli.main import _with_whole_promises, main
from ridgeline.cli.params.load import ROWS
from ridgeline.measure.bench_options import BenchOptions


def test_every_option_has_a_flag_of_its_type_and_default() -> None:
    fields = {field.name: field for field in msgspec.structs.fields(BenchOptions)}
    assert {name for name, _, _ in ROWS} == set(fields) - {"seed"}
    for name, _, text in ROWS:
        default = fields[name].default
        if default is None:
            assert "(default" not in text
        else:
            shown = "on" if default is True else str(default)
            assert f"(default: {shown.removesuffix('.0')})" in text, name


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--url", "http://127.0.0.1:9", "--dtype", "float32"], "--dtype"),
        (["demo", "--url", "http://127.0.0.1:9"], "demo"),
        (["--endpoint", "chat"], "--endpoint"),
        (["--served-model-name", "x"], "--served-model-name"),
        (["demo", "--model", "demo"], "--model"),
        (["--url", "http://h", "--model", "a", "--served-model-name", "b"], "--model"),
        (["--endpoint", "smoke", "--url", "http://127.0.0.1:9"], "--endpoint"),
        (["--workload", "nonsense"], "nonsense"),
        (["--workload", "synthetic:input=x"], "synthetic"),
        (["--goodput", "ttft=200"], "ttft=200"),
        (["--goodput", "ttft:nan"], "ttft:nan"),
        (["--percentile-metrics", "speed"], "speed"),
        (["--metric-percentiles", "101"], "101"),
        (["--request-rate", "0"], "rate"),
        (["--num-prompts", "0"], "0"),
        (["--json", "no/such/folder/x.json"], "no/such/folder"),
    ],
)
def test_bad_flags(capsys: pytest.CaptureFixture[str], args: list[str], named: str) -> None:
    assert main(["bench", *args]) == 2
    err = capsys.readouterr().err
    assert named in err and len(err.splitlines()) == 1, err


def test_a_small_run_writes_the_keys_of_vllm(
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
    load = ["--random-input-len", "8", "--random-output-len", "4"]
    file = tmp_path / "result.json"
    memory = ["--kv-cache-memory-bytes", "32MiB"]
    assert main([*args, *load, *memory, "--json", str(file)]) == 0
    assert "ttft" in capsys.readouterr().out
    result = json.loads(file.read_text())
    assert result["completed"] == 3 and result["total_output_tokens"] == 12


@pytest.mark.parametrize("asked", [["--goodput", "ttft:200"], ["--goodput=ttft:200"]])
def test_a_promise_may_stand_in_several_words(asked: list[str]) -> None:
    """As vLLM's users write it; a model's name with a colon is none of them."""
    more = ["tpot:50", "e2el:900", "dummy:llama-1b-32k", "--seed", "1"]
    joined = _with_whole_promises(["bench", *asked, *more])
    assert joined[-3:] == more[2:] and joined[-4].endswith("ttft:200 tpot:50 e2el:900")
    assert len(joined) == len(asked) + 4
