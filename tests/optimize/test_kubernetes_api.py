"""`--kubernetes` over a Kubernetes API: the real kubectl against kmock, and its golden traffic.

The API server has only the rights that `--rbac` prints. No real cluster has been tried.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ridgeline.errors import CannotRun
from ridgeline.optimize.drivers import in_place
from ridgeline.optimize.drivers.kubernetes import copy as kubernetes_copy
from ridgeline.optimize.drivers.kubernetes.rights import rights_manifest
from ridgeline.optimize.drivers.server_process import free_port
from ridgeline.workflows.optimize.server_driver import RestartableServer, open_driver
from tests.optimize import fake_tools

pytest.importorskip("kmock")
from tests.optimize.kmock_cluster import Cluster, rules_of, running

KUBECTL = shutil.which("kubectl")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed"),
]
GOLDEN = Path(__file__).with_name("kubernetes_traffic.json")
WORDS = ["m", "--port", "8000", "--max-num-seqs", "4"]


def deployment(port: int) -> dict[str, Any]:
    words = [str(port) if word == "8000" else word for word in WORDS]
    container = {"name": "vllm", "image": "v", "command": ["vllm", "serve"], "args": words}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "chat", "namespace": "prod", "generation": 1, "uid": "chat-uid"},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {"app": "chat"}},
            "template": {
                "metadata": {"labels": {"app": "chat"}},
                "spec": {"containers": [container]},
            },
        },
    }


class Place:
    """A cluster with a Deployment `prod/chat` that runs, and the options that name it."""

    def __init__(self, cluster: Cluster, folder: Path, port: int, *, on_copy: bool) -> None:
        self.cluster, self.folder, self.port, self.on_copy = cluster, folder, port, on_copy
        url = "http://127.0.0.1:{port}" if on_copy else f"http://127.0.0.1:{port}"
        self.server = RestartableServer(url=url, kubernetes="prod/chat", start_timeout_s=8)
        self.lines: list[str] = []

    def driver(self) -> Any:
        return open_driver(self.server, self.folder, self.lines.append)[1]

    def arguments(self) -> list[str]:
        """Of the server that users have."""
        return arguments_at(self.port)


def arguments_at(port: int) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as reply:
        return list(json.load(reply)["arguments"])


def until(holds: Callable[[], bool]) -> None:
    for _ in range(200):
        with suppress(OSError):
            if holds():
                return
        time.sleep(0.05)
    pytest.fail("it did not happen")


@pytest.fixture
def open_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Place]]:
    """Makes the cluster: the real kubectl, but for port-forward, which kmock does not speak."""
    programs = tmp_path / "bin"
    programs.mkdir()
    script = programs / "kubectl"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *port-forward*) exec sleep 60;; esac\nexec {KUBECTL} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))  # kubectl's cache of what the server offers
    monkeypatch.setattr(fake_tools, "FOLDER", tmp_path)
    monkeypatch.setattr(in_place, "POLL_S", 0.2)
    copy_port = free_port()
    monkeypatch.setattr(kubernetes_copy, "free_port", lambda: copy_port)
    open_clusters = []

    def make(*, on_copy: bool, lacking: tuple[str, ...] = ()) -> Place:
        rules = rules_of(rights_manifest("prod/chat", on_copy=on_copy))
        rules = [row for row in rules if row["resources"][0] not in lacking]
        cluster, port = Cluster(rules, copy_port), free_port()
        context = running(cluster, tmp_path)
        monkeypatch.setenv("KUBECONFIG", str(context.__enter__()))
        open_clusters.append(context)
        cluster.add(deployment(port))
        place = Place(cluster, tmp_path, port, on_copy=on_copy)
        until(lambda: bool(place.arguments()))
        return place

    yield make
    for context in open_clusters:
        context.__exit__(None, None, None)
    for process in fake_tools.STARTED:
        process.wait()
    fake_tools.STARTED.clear()


def test_configurations_are_tried_on_a_copy_over_the_api(
    open_place: Callable[..., Place],
) -> None:
    place = open_place(on_copy=True)
    former = place.arguments()
    with place.driver() as driver:
        baseline = driver.configure([], place.folder / "log")
        baseline.start()
        assert "chat-ridgeline" in place.cluster.pods_of
        driver.configure(["--max-num-seqs", "64"], place.folder / "log").start()
        assert "64" in arguments_at(place.cluster.copy_port)
        with pytest.raises(CannotRun, match="no such weights"):
            driver.configure(["--fail"], place.folder / "log").start()
        assert place.arguments() == former, "users keep their server"
    assert list(place.cluster.pods_of) == ["chat"]
    for resource in ("apps/v1/deployments", "v1/services"):
        assert place.cluster.objects[resource, "prod", "chat-ridgeline"].deleted
    assert not (place.folder / "restore.sh").exists()
    assert place.arguments() == former
    check_traffic("copy", place)
    used = {place.cluster.rules[number]["resources"][0] for number, _ in place.cluster.used}
    assert used == {"deployments", "services", "pods", "pods/log"}


def test_deployment_is_patched_in_place_and_restored_over_the_api(
    open_place: Callable[..., Place],
) -> None:
    place = open_place(on_copy=False)
    former = place.arguments()
    with place.driver() as driver:
        driver.configure(["--max-num-seqs", "64"], place.folder / "log").start()
        assert "64" in place.arguments()
        with pytest.raises(CannotRun, match="former configuration was restored"):
            driver.configure(["--no-image"], place.folder / "log").start()
    until(lambda: place.arguments() == former)
    check_traffic("in place", place)
    assert all(verb in place.cluster.rules[number]["verbs"] for number, verb in place.cluster.used)


def test_patch_over_a_change_of_someone_else_is_refused_by_the_api(
    open_place: Callable[..., Place],
) -> None:
    place = open_place(on_copy=False)
    driver = place.driver()
    theirs = deployment(place.port)
    theirs["spec"]["template"]["spec"]["containers"][0]["args"] += ["--theirs"]
    place.cluster.objects["apps/v1/deployments", "prod", "chat"].patch(theirs)
    with driver, pytest.raises(CannotRun, match="changed by someone else"):
        driver.configure(["--max-num-seqs", "8"], place.folder / "log").start()
    kept = place.cluster.objects["apps/v1/deployments", "prod", "chat"].raw
    assert kept["spec"]["template"] == theirs["spec"]["template"]


KILLED = """
import signal
from pathlib import Path
from ridgeline.optimize.drivers import in_place
from ridgeline.optimize.drivers.kubernetes import copy as kubernetes_copy
from ridgeline.workflows.optimize.server_driver import RestartableServer, open_driver
in_place.POLL_S = 0.2
kubernetes_copy.free_port = lambda: {port}
folder = Path({folder!r})
driver = open_driver({server}, folder, print)[1].__enter__()
print("up", flush=True)
signal.pause()
"""


def test_copy_is_deleted_after_a_kill(open_place: Callable[..., Place]) -> None:
    place = open_place(on_copy=True)
    former = place.arguments()
    code = KILLED.format(
        folder=str(place.folder), server=repr(place.server), port=place.cluster.copy_port
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert any(line == "up\n" for line in process.stdout)
    assert "chat-ridgeline" in place.cluster.pods_of
    process.send_signal(signal.SIGKILL)
    process.communicate()
    until(lambda: list(place.cluster.pods_of) == ["chat"])
    assert place.arguments() == former


@pytest.mark.parametrize("lacking", ["services", "pods"])
def test_missing_right_is_named_and_nothing_stays(
    open_place: Callable[..., Place], lacking: str
) -> None:
    place = open_place(on_copy=True, lacking=(lacking,))
    server = msgspec.structs.replace(place.server, start_timeout_s=1.5)
    driver = open_driver(server, place.folder, place.lines.append)[1]
    with pytest.raises(CannotRun, match=f'cannot .* resource "{lacking}"'), driver:
        pass
    assert list(place.cluster.pods_of) == ["chat"]


def check_traffic(name: str, place: Place) -> None:
    """Compare the changing requests with those on record; RIDGELINE_GOLDEN=1 writes them."""
    ports = {str(place.port): "PORT", str(place.cluster.copy_port): "LOCAL"}
    text = json.dumps([row for row in place.cluster.calls if row["method"] != "GET"])
    for port, word in ports.items():
        text = text.replace(f'"{port}"', f'"{word}"').replace(f": {port}", f': "{word}"')
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("RIDGELINE_GOLDEN"):
        GOLDEN.write_text(json.dumps(golden | {name: json.loads(text)}, indent=1) + "\n")
        return
    assert json.loads(text) == golden[name]
