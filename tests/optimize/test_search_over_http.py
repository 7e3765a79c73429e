"""A whole search over HTTP: a twin of vLLM with a planted handicap, on the real clock."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TWIN = (
    f"{sys.executable} -m ridgeline twin --device l4 --speed 6 vllm serve llama-3.1-8b "
    "--max-num-seqs 2 --port {port} {flags}"
)


@pytest.mark.slow
def test_too_few_slots_are_found_and_kept_over_http(tmp_path: Path) -> None:
    """Two slots on a device that serves dozens: diagnosed, applied, verified, priced, kept."""
    words = [
        *(sys.executable, "-m", "ridgeline", "optimize", "--restart-cmd", TWIN),
        *("--url", "http://127.0.0.1:{port}", "--workload", "synthetic:input=512,output=24"),
        *("--slo", "ttft:500 tpot:40", "--budget", "4m", "--price-per-hour", "0.8"),
        *("--output", str(tmp_path)),
    ]
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=420, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    ladder = json.loads((tmp_path / "ladder.json").read_text())
    kept = [trial for trial in ladder["trials"] if trial["verdict"] == "kept"]
    assert kept, done.stdout
    assert ladder["total"]["low"] > 1.5
    before, after = ladder["baseline"]["cost"], ladder["final"]["cost"]
    assert after["output_dollars_per_mtok"] < before["output_dollars_per_mtok"]
    script = (tmp_path / "serve.sh").read_text()
    slots = re.search(r"--max-num-seqs (\d+)", script)
    assert slots is not None and int(slots[1]) > 2
    assert "kept" in done.stdout and "the goodput" in done.stdout
