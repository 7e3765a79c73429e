"""`ridgeline serve` and `generate` as a user runs them: processes, signals, streams, a file."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from ridgeline.cli.main import main

RIDGELINE = [sys.executable, "-m", "ridgeline"]
SMALL = ["--kv-cache-memory-bytes", "32MiB"]


@contextmanager
def serving(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running server and its URL; whatever the test leaves of it is ended."""
    command = [*RIDGELINE, "serve", *args, "--port", "0", *SMALL]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"(http://\S+)/v1", line):
                yield process, found[1]
                return
        pytest.fail("the server ended before it was ready")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_configuration_file_serves_and_a_signal_ends_it(tmp_path: Path) -> None:
    file = tmp_path / "ridgeline.toml"
    file.write_text(
        '[engine]\nmodel = "demo"\nmax_num_seqs = 4\n[server]\nserved_model_name = "mine"\n'
        '[provenance]\nworkload = "chat-and-code"\n'
    )
    with serving("--config", str(file)) as (process, url):
        assert httpx.get(f"{url}/health").status_code == 200
        body = {"model": "mine", "prompt": "import", "max_tokens": 3}
        reply = httpx.post(f"{url}/v1/completions", json=body)
        assert reply.json()["usage"]["completion_tokens"] == 3
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        assert "Traceback" not in err


def test_generate_writes_the_answer_to_stdout_and_figures_to_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n"))
    assert main(["generate", "demo", "-", "--max-tokens", "5", *SMALL]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n") and "tok" not in out
    assert re.search(r"5 tokens · TTFT \d+ ms", err) and "tok/s" not in err  # of too few tokens


def test_generate_with_the_chat_template(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "demo", "hello", "--chat", "--max-tokens", "2", *SMALL]) == 0
    assert "2 tokens" in capsys.readouterr().err
