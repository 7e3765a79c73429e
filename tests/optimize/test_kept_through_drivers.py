"""A planted fault is found, repaired and kept through each driver that changes a server in place.

The server has too few slots, and a step of it takes as long for one sequence as for many. Each
search takes four minutes of a machine that does little else, so `make test-drivers` runs them, and
the ordinary suite does not.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ridgeline.cli.main import main
from ridgeline.optimize.drivers.kubernetes import copy as kubernetes_copy
from ridgeline.optimize.drivers.server_process import free_port
from ridgeline.workflows.optimize import optimize as workflow
from ridgeline.workflows.optimize.server_driver import RestartableServer
from tests.hardware.test_hardware_doctor import MACHINE
from tests.optimize.ladders import MORE_SLOTS
from tests.optimize.test_drivers import (
    Make,
    Place,
    await_models,
    by_script,
    in_docker,
    in_kubernetes,
    on_a_copy,
    place,
)

__all__ = ["place"]

LADDER = MORE_SLOTS % 32
WAYS = {"apply_cmd": "--apply-cmd", "docker": "--docker", "kubernetes": "--kubernetes"}


def arguments(server: RestartableServer, folder: Path) -> list[str]:
    ladder = folder / "ladder.toml"
    ladder.write_text(LADDER)
    [way] = [name for name in WAYS if getattr(server, name) is not None]
    words = ["optimize", "demo", "--url", server.url, WAYS[way], getattr(server, way)]
    if server.server_cmd is not None:
        words += ["--server-cmd", server.server_cmd]
    words += ["--ladder", str(ladder), "--workload", "synthetic:input=16,output=6"]
    words += ["--slo", "ttft:900 tpot:300", "--budget", "240s", "--shared-machine"]
    return [*words, "--output", str(folder / "out")]


@pytest.mark.slow
@pytest.mark.skipif("RIDGELINE_DRIVERS" not in os.environ, reason="minutes each: make test-drivers")
@pytest.mark.parametrize("make", [by_script, in_docker, in_kubernetes, on_a_copy])
def test_planted_fault_is_repaired_and_kept_through_a_driver(
    place: Place, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflow, "probe", lambda: MACHINE)
    if make is on_a_copy:
        port = free_port()
        monkeypatch.setattr(kubernetes_copy, "free_port", lambda: port)
    server = make(place)
    if make is on_a_copy:
        place.write(forwarded=port)
    await_models(place)
    former = place.arguments()
    assert main(arguments(server, place.folder)) == 0
    result = json.loads((place.folder / "out" / "ladder.json").read_text())
    kept = [trial for trial in result["trials"] if trial["verdict"] == "kept"]
    assert kept, [(trial["verdict"], trial["reason"]) for trial in result["trials"]]
    assert result["total"]["low"] > 1.5
    assert "--max-num-seqs" in (place.folder / "out" / "serve.sh").read_text()
    assert place.arguments() == former, "the former configuration is restored"
