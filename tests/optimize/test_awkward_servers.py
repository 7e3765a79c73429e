"""Searches of servers that are not as one would like, each of a real process over HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.main import main
from ridgeline.errors import CannotRun
from ridgeline.optimize import time_budget
from ridgeline.optimize.drivers.server_process import (
    ServerCommand,
    ServerProcess,
    answers,
    free_port,
)
from ridgeline.workflows.optimize import optimize as workflow
from tests.hardware.test_hardware_doctor import MACHINE
from tests.optimize import fake_tools
from tests.optimize.ladders import MORE_SLOTS

SERVER = f"{sys.executable} -IS {fake_tools.__file__} server m"
LADDER = MORE_SLOTS % 16


@contextmanager
def foreign(*words: str, url: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of someone else that answers at an address."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            if answers(url):
                break
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("words", "path", "error"),
    [
        ([*SERVER.split()[1:], "--port"], "/v1/models", "another server answers"),
        (["-m", "http.server", "--bind", "127.0.0.1"], "/", "Address already in use"),
    ],
)
def test_port_of_someone_else_is_named_and_left_alone(
    words: list[str], path: str, error: str, tmp_path: Path
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with foreign(sys.executable, *words, str(port), url=url + path) as process:
        command = ServerCommand(url=url, command=f"{SERVER} --port {port} {{flags}}")
        server = ServerProcess(command, [], tmp_path / "ours.log")
        with pytest.raises(CannotRun, match=error):
            server.start()
        assert not server.is_up
        assert process.poll() is None and answers(url + path)


def search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str, *options: str
) -> dict[str, Any]:
    """The result of a search from two slots, with runs of about half a second.

    It ends when its only rung has been tried; the budget is for a machine that is very busy.
    """
    monkeypatch.setattr(workflow, "probe", lambda: MACHINE)
    monkeypatch.setattr(workflow, "SMALLEST_BUDGET_S", 5.0)
    monkeypatch.setattr(time_budget, "MIN_WINDOW_S", 0.5)
    monkeypatch.setattr(time_budget, "MAX_WINDOW_S", 0.5)
    monkeypatch.setattr(time_budget, "REPORT_S", 0.5)
    monkeypatch.setenv("FAKE_STEP_S", "0.04")
    (tmp_path / "ladder.toml").write_text(LADDER)
    command = f"{SERVER} --max-num-seqs 2 {server} --port {{port}} {{flags}}"
    words = ["optimize", "demo", "--url", "http://127.0.0.1:{port}", "--restart-cmd", command]
    words += ["--server", "vllm", "--ladder", str(tmp_path / "ladder.toml"), "--shared-machine"]
    words += ["--workload", "synthetic:input=16,output=4", "--slo", "ttft:400 tpot:400"]
    words += ["--budget", "20m", "--output", str(tmp_path / "out"), *options]
    main(words)
    return dict(json.loads((tmp_path / "out" / "ladder.json").read_text()))


@pytest.mark.slow
def test_search_of_a_server_with_a_key_and_no_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = search(tmp_path, monkeypatch, "--api-key secret", "--api-key", "secret")
    assert result["trials"][0]["verdict"] == "kept"
    assert result["baseline"]["measured"]["goodput_req_s"] > 0


@pytest.mark.slow
def test_search_without_the_key_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FileNotFoundError):
        search(tmp_path, monkeypatch, "--api-key secret")
    assert "requires an API key" in capsys.readouterr().err


@pytest.mark.slow
def test_server_that_crashes_in_a_trial_ends_the_trial_and_not_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = search(tmp_path, monkeypatch, "--crash-above 2")
    assert result["trials"]
    for trial in result["trials"]:
        assert trial["verdict"] == "crashed"
        assert "CUDA error: an illegal memory access" in trial["reason"]
    assert result["final"]["settings"] == result["baseline"]["settings"]
