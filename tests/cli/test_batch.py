"""`ridgeline batch` as a user runs it: a file in, a file out, and going on after a `kill -9`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from ridgeline.cli.main import main
from ridgeline.serve.batch.offline_runner import errors_path, store_path
from ridgeline.serve.batch.store import BatchStore
from tests.serve.batch.helpers import jsonl, request

TINY = ["--model", "demo", "--kv-cache-memory-bytes", "32MiB", "--max-num-seqs", "4"]
SMALL = [*TINY, "--served-model-name", "fake"]  # what the lines of the helpers call the model


def custom_ids(path: Path) -> Counter[str]:
    return Counter(json.loads(line)["custom_id"] for line in path.read_text().splitlines())


@pytest.mark.slow
def test_requests_file_gives_a_results_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bad = request("bad")
    bad["body"]["temperature"] = -1
    file.write_bytes(jsonl(request("a"), bad, request("b")))
    assert main(["batch", str(file), "-o", str(output), *SMALL]) == 1
    assert custom_ids(output) == Counter("ab")
    assert custom_ids(errors_path(output)) == Counter(["bad"])
    assert "2 of 3 requests answered" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.jsonl", "out.errors.jsonl", "out.jsonl"
    ]  # fmt: skip


@pytest.mark.slow
def test_lines_that_name_another_model_fail_as_on_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [request("theirs"), request("ours"), request("anybody's")]
    lines[0]["body"]["model"], lines[1]["body"]["model"] = "gpt-4o", "demo"
    del lines[2]["body"]["model"]
    file.write_bytes(jsonl(*lines))
    assert main(["batch", str(file), "-o", str(output), *TINY]) == 1
    assert custom_ids(output) == Counter(["ours", "anybody's"])
    failed = json.loads(errors_path(output).read_text())
    assert failed["custom_id"] == "theirs" and failed["response"]["status_code"] == 404


def test_the_model_of_a_configuration_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no --model is given."""
    file, config = tmp_path / "in.jsonl", tmp_path / "ridgeline.toml"
    file.write_bytes(jsonl(request("a")))
    config.write_text('[engine]\nmodel = "/nowhere/mine"\n')
    asked = ["batch", str(file), "-o", str(tmp_path / "out"), "--config", str(config)]
    assert main(asked) == 2
    assert "limit: mine" in capsys.readouterr().err


def test_run_does_not_start_if_every_request_is_invalid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ridgeline.engine.engine import Engine

    def opened(*args: object) -> None:
        raise AssertionError("an engine was opened")

    monkeypatch.setattr(Engine, "from_settings", opened)
    file = tmp_path / "in.jsonl"
    file.write_bytes(jsonl(request("a"), request("b")))
    assert main(["batch", str(file), "-o", str(tmp_path / "out.jsonl"), *TINY]) == 2
    err = capsys.readouterr().err
    assert "'fake'" in err and "limit: demo" in err and "--served-model-name fake" in err
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize(
    ("name", "output"), [("in.jsonl", "in.jsonl"), ("a.errors.jsonl", "a.jsonl"), ("in.jsonl", ".")]
)
def test_nothing_is_written_over_the_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, output: str
) -> None:
    file, asked = tmp_path / name, jsonl(request("a"))
    file.write_bytes(asked)
    assert main(["batch", str(file), "-o", str(tmp_path / output), *SMALL]) == 2
    assert "fix: name" in capsys.readouterr().err
    assert file.read_bytes() == asked and [*tmp_path.iterdir()] == [file]


@pytest.mark.slow
def test_killed_run_is_resumed_by_the_same_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    names = [f"line-{i}" for i in range(40)]
    lines = [request(name) for name in names]
    for line in lines:
        line["body"]["ignore_eos"] = True
    file.write_bytes(jsonl(*lines))
    arguments = ["batch", str(file), "-o", str(output), *SMALL]
    command = [sys.executable, "-m", "ridgeline", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    done = 0
    while done < 4:
        time.sleep(0.02)
        assert process.poll() is None, "all was done before it could be disturbed"
        done = settled(output)
    process.kill()
    process.wait()
    assert not output.exists() and settled(output) >= 4
    assert main(arguments) == 0
    assert "resuming an interrupted run" in capsys.readouterr().err
    assert custom_ids(output) == Counter(names)
    assert not store_path(output).exists()


def settled(output: Path) -> int:
    if not store_path(output).exists():
        return 0
    store = BatchStore(store_path(output))
    batches = store.page(limit=1)
    store.close()
    return batches[0].completed if batches else 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no requests"),
        (b"{\n", "line 1"),
        (jsonl(request("a"), request("a")), "custom_id"),
        (jsonl(request("a", url="/v1/images")), "not served"),
    ],
)
def test_a_bad_file_is_refused_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(content)
    assert main(["batch", str(file), "-o", str(tmp_path / "out"), "--model", "/nowhere"]) == 2
    assert message in capsys.readouterr().err


def test_missing_files_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batch", str(tmp_path / "x"), "-o", str(tmp_path / "out")]) == 2
    file = tmp_path / "in.jsonl"
    file.write_bytes(jsonl(request("a")))
    assert main(["batch", str(file), "-o", str(tmp_path / "no" / "out")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_store_of_another_input_is_not_reused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.serve.batch.helpers import created

    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_bytes(jsonl(request("a")))
    store = BatchStore(store_path(output))
    created(store, "another batch", metadata={"sha256": "other"})
    store.close()
    assert main(["batch", str(file), "-o", str(output), *SMALL]) == 2
    assert "belongs to another input" in capsys.readouterr().err
    assert store_path(output).exists() and not output.exists()
