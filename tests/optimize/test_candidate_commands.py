"""Whole command lines as candidates: how a server with prefill and decode apart is tried."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.request
from pathlib import Path

import msgspec
import pytest

from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput
from ridgeline.optimize.cost import MachinePrice
from ridgeline.optimize.drivers.server_process import ServerProcess
from ridgeline.optimize.job import OptimizeJob
from ridgeline.optimize.ladder import candidates_of
from ridgeline.optimize.result import LadderResult
from ridgeline.optimize.search import optimize
from ridgeline.optimize.server_settings import WHOLE_COMMAND, flags_of, recorded_settings
from ridgeline.records import Slo
from ridgeline.workflows.optimize.restartable_server import ServerRecipe, server_recipe
from ridgeline.workflows.optimize.server_driver import RestartableServer
from tests.handicaps.virtual_servers import Traffic, VirtualServers

URL = "http://127.0.0.1:{port}"
ONE = "vllm serve llama-3.1-8b --port {port} {flags}"
SPLIT = "sh split.sh {port} {flags}"


def recipe_with(folder: Path, command: str, url: str = URL) -> ServerRecipe:
    server = RestartableServer(url=url, restart_cmd=ONE, candidate_commands=(command,))
    return server_recipe(server, folder)


def test_command_takes_the_place_of_the_whole_line_and_gets_the_flags(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, SPLIT)
    start = recipe.start_settings(Settings(model="dummy:llama-3.1-8b"))
    [rung] = recipe.candidate_rungs
    [option] = candidates_of(rung, start, {})
    assert SPLIT in option.label
    more = msgspec.structs.replace(option.settings, max_num_seqs=64)
    words = recipe.command.words(recipe.flags.words(more, start), 9000)
    assert words == ["sh", "split.sh", "9000", "--max-num-seqs", "64"]
    assert recipe.serve_script(more, start).endswith("exec sh split.sh 8000 --max-num-seqs 64\n")
    assert recipe.command.words(recipe.flags.words(start, start), 9000)[0] == "vllm"


@pytest.mark.parametrize(
    ("command", "says"), [("sh split.sh {port}", "placeholder"), ("sh split.sh {flags}", "{port}")]
)
def test_command_without_its_placeholders_is_refused(
    command: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=says):
        recipe_with(tmp_path, command)


ROUTER = """
import http.server, json, os, subprocess, sys, time
half = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("half.pid", "w").write(str(half.pid))
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": "m"}], "argv": sys.argv[2:]}).encode()
        self.send_response(200); self.end_headers(); self.wfile.write(body)
    def log_message(self, *a): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Page).serve_forever()
"""


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def test_processes_of_the_layout_start_and_end_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script starts a second process, as one with prefill and decode servers does."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "router.py").write_text(ROUTER)
    recipe = recipe_with(tmp_path, f"{sys.executable} router.py {{port}} {{flags}}")
    start = recipe.start_settings(Settings(model="dummy:llama-3.1-8b"))
    [option] = candidates_of(recipe.candidate_rungs[0], start, {})
    flags = recipe.flags.words(msgspec.structs.replace(option.settings, max_num_seqs=9), start)
    process = ServerProcess(recipe.command, flags, tmp_path / "log")
    try:
        process.start()
        with urllib.request.urlopen(f"{process.url}/v1/models", timeout=5) as reply:
            assert json.load(reply)["argv"] == ["--max-num-seqs", "9"]
    finally:
        process.stop()
    half = int((tmp_path / "half.pid").read_text())
    deadline_s = time.monotonic() + 10
    while is_running(half) and time.monotonic() < deadline_s:
        pass  # it was killed, and has to be scheduled once more to end
    assert not is_running(half)


def searched(command: str) -> LadderResult:
    servers = VirtualServers(
        "vllm", "--max-num-seqs 8", traffic=Traffic(prompt=128, output=32), device="l4"
    )
    servers.num_devices = 2
    servers.commands = (command,)
    only = tuple(rung for rung in servers.ladder.rungs if rung.id == "command-1")
    job = OptimizeJob(
        settings=servers.start,
        defaults=servers.start,
        workload="w",
        slo=Slo.parse("ttft:1500 tpot:120"),
        objective="goodput",
        budget_s=600.0,
        price=MachinePrice(),
    )
    ladder = msgspec.structs.replace(servers.ladder, rungs=only)
    return asyncio.run(optimize(job, servers.environment(), ladder, clock=servers.clock))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "verdict"),
    [("--data-parallel-size 2", "kept"), ("--enforce-eager --no-async-scheduling", "not kept")],
)
def test_layout_that_gains_is_kept_and_another_is_not(layout: str, verdict: str) -> None:
    command = (
        "ridgeline twin --device l4:2 vllm serve llama-3.1-8b --max-num-seqs 8 --port {port} "
        f"{layout} {{flags}}"
    )
    result = searched(command)
    kept = [trial for trial in result.trials if trial.verdict == "kept"]
    assert bool(kept) == (verdict == "kept")
    final = dict(flags_of(recorded_settings(result.final.settings)))
    assert (WHOLE_COMMAND in final) == bool(kept)
