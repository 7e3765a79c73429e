"""Whole searches of a twin of vLLM with a planted handicap, from the command line to the files.

The first one is quick: its servers answer on a virtual clock, and everything else is the command's.
`make test-loop` runs the same search with real processes over HTTP, for four minutes on a machine
that does little else.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ridgeline.cli.main import main
from ridgeline.workflows.optimize import optimize as workflow
from tests.handicaps.virtual_servers import Traffic, VirtualServers
from tests.hardware.test_hardware_doctor import MACHINE
from tests.optimize.ladders import MORE_SLOTS

TWIN = (
    f"{sys.executable} -m ridgeline twin --device l4 --speed 6 vllm serve llama-3.1-8b "
    "--max-num-seqs 2 --port {port} {flags}"
)


def check_result(folder: Path, shown: str) -> None:
    """More slots were kept, are cheaper per token, and are in the command line to deploy."""
    ladder = json.loads((folder / "ladder.json").read_text())
    kept = [trial for trial in ladder["trials"] if trial["verdict"] == "kept"]
    assert kept, shown
    assert ladder["total"]["low"] > 1.5
    before, after = ladder["baseline"]["cost"], ladder["final"]["cost"]
    assert after["output_dollars_per_mtok"] < before["output_dollars_per_mtok"]
    script = (folder / "serve.sh").read_text()
    slots = re.search(r"--max-num-seqs (\d+)", script)
    assert slots is not None and int(slots[1]) > 2
    assert "kept" in shown and "the goodput" in shown


LADDER = MORE_SLOTS % 32


@pytest.mark.slow
def test_too_few_slots_are_found_and_kept_on_a_virtual_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    servers = VirtualServers(
        "vllm", "--max-num-seqs 2", traffic=Traffic(prompt=96, output=24), device="l4"
    )
    monkeypatch.setattr(workflow, "_environment", lambda *arguments: servers.environment())
    monkeypatch.setattr(workflow, "probe", lambda: MACHINE)
    monkeypatch.setattr(workflow, "time", SimpleNamespace(perf_counter=servers.clock))
    (tmp_path / "ladder.toml").write_text(LADDER)
    words = [
        *("optimize", "dummy:llama-3.1-8b", "--restart-cmd", servers.recipe.command.command),
        *("--url", "http://127.0.0.1:{port}", "--workload", "synthetic:input=96,output=24"),
        *("--slo", "ttft:2000 tpot:100", "--budget", "12m", "--price-per-hour", "0.8"),
        *("--ladder", str(tmp_path / "ladder.toml"), "--output", str(tmp_path / "out")),
    ]
    monkeypatch.setenv("COLUMNS", "200")
    assert main(words) == 0
    check_result(tmp_path / "out", capfd.readouterr().out)


PLAYBOOKS = {
    "out-of-memory": ("l4", "--gpu-memory-utilization 0.83", Traffic(prompt=1536, output=64)),
    "long-context": (
        "l4",
        "--no-enable-prefix-caching",
        Traffic(prompt=3072, output=32, shared=2048),
    ),
    "throughput": ("l4", "--max-num-seqs 4", Traffic(prompt=384, output=64)),
    "batch": ("l4", "--max-num-seqs 8", Traffic(prompt=256, output=64)),
    "latency-api": ("l40s", "--enforce-eager", Traffic(prompt=384, output=64)),
    "long-output": ("l40s", "--enforce-eager", Traffic(prompt=256, output=512)),
}
"""Playbook → device, the planted fault, and traffic of its kind."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAYBOOKS)
def test_playbook_runs_to_its_checklist(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if name != "out-of-memory" and "RIDGELINE_LOOP" not in os.environ:
        pytest.skip("ten seconds each: make test-loop")
    device, flags, traffic = PLAYBOOKS[name]
    servers = VirtualServers("vllm", flags, traffic=traffic, device=device)
    monkeypatch.setattr(workflow, "_environment", lambda *arguments: servers.environment())
    monkeypatch.setattr(workflow, "probe", lambda: MACHINE)
    monkeypatch.setattr(workflow, "time", SimpleNamespace(perf_counter=servers.clock))
    monkeypatch.setenv("COLUMNS", "200")
    words = [
        *("optimize", "dummy:llama-3.1-8b", "--restart-cmd", servers.recipe.command.command),
        *("--url", "http://127.0.0.1:{port}", "--playbook", name, "--budget", "20m"),
        *("--price-per-hour", "0.8", "--output", str(tmp_path)),
    ]
    assert main(words) == 0
    ladder = json.loads((tmp_path / "ladder.json").read_text())
    assert any(trial["verdict"] == "kept" for trial in ladder["trials"])
    shown = capfd.readouterr().out
    for group in ("functional", "performance", "cost", "stability"):
        assert f"# {group}: " in shown
    assert (tmp_path / "serve.sh").exists()


@pytest.mark.slow
@pytest.mark.skipif("RIDGELINE_LOOP" not in os.environ, reason="four minutes: make test-loop")
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
    check_result(tmp_path, done.stdout)
