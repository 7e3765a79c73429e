"""A fleet on Ray: two servers from one command, a killed one, a rolling update, the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.errors import BadInput
from ridgeline.fleet.ray.fleet_file import read_fleet_file
from tests.fleet.processes import free_port, wait_until

FILE = """
port = {port}
drain_s = 10
[[models]]
model = "demo"
replicas = 2
cpus = 0.1
serve = ["--num-threads", "1", "--kv-cache-memory-bytes", "32M", "--max-num-seqs", "{seqs}"]
"""
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port = 1", "not valid"),
        ("models = []", r"no \[\[models\]\]"),
        ('[[models]]\nmodel = "a"\nreplicas = 0', "at least 1"),
        ('[[models]]\nmodel = "a"\nreplica = 1', "not valid"),
        ('[[models]]\nmodel = "x/a"\n[[models]]\nmodel = "y/a"', "the same name"),
    ],
)
def test_faulty_fleet_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    with pytest.raises(BadInput, match=message):
        read_fleet_file(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        read_fleet_file(tmp_path / "none.toml")


class RunningFleet:
    """`ridgeline fleet up` as a process."""

    def __init__(self, folder: Path) -> None:
        self.port, self.file = free_port(), folder / "fleet.toml"
        self.write(seqs=4)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ridgeline", "fleet", "up", str(self.file)],
            env={**os.environ, "RAY_TMPDIR": str(folder)},
        )
        self.environment = {**os.environ, "RAY_TMPDIR": str(folder)}

    def write(self, seqs: int) -> None:
        self.file.write_text(FILE.format(port=self.port, seqs=seqs))

    def command(self, *words: str) -> str:
        command = [sys.executable, "-m", "ridgeline", "fleet", *words]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=True
        ).stdout

    def status(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.command("status", "--json"))
        return result

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    running = RunningFleet(tmp_path_factory.mktemp("ray"))
    try:
        wait_until(running.is_ready, 600)
        yield running
    finally:
        running.process.send_signal(signal.SIGTERM)
        running.process.wait(120)


class Load:
    """Clients that stream answers until `stop`; `texts` by prompt, and what failed."""

    def __init__(self, url: str) -> None:
        self.url, self.texts, self.failed = url, dict[str, set[str]](), list[str]()
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(3)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        body = {"model": "demo", "prompt": f"def f{number}(", "max_tokens": 48, "stream": True}
        with httpx.Client(timeout=120) as client:
            while not self._stopped.is_set():
                try:
                    with client.stream(
                        "POST", f"{self.url}/v1/completions", json={**body, "temperature": 0}
                    ) as reply:
                        lines = [line for line in reply.iter_lines() if line.startswith("data: ")]
                except httpx.HTTPError as error:
                    self.failed.append(repr(error))
                    continue
                if reply.status_code != 200 or lines[-1] != "data: [DONE]":
                    self.failed.append(f"{reply.status_code} {lines[-1:]}")
                    continue
                text = "".join(
                    json.loads(line[6:])["choices"][0]["text"]
                    for line in lines[:-1]
                    if json.loads(line[6:]).get("choices")
                )
                self.texts.setdefault(str(number), set()).add(text)

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
def test_killed_server_is_replaced_and_loses_no_answer(fleet: RunningFleet) -> None:
    wait_until(lambda: sum(s["is_ready"] for s in fleet.status()["servers"]) == 2, 400)
    before = {server["pid"] for server in fleet.status()["servers"]}
    load = Load(fleet.url)
    time.sleep(2)
    os.kill(min(before), signal.SIGKILL)

    def is_replaced() -> bool:
        servers = [s for s in fleet.status()["servers"] if s["is_ready"]]
        return len(servers) == 2 and min(before) not in {s["pid"] for s in servers}

    wait_until(is_replaced, 400)
    load.stop()
    assert load.failed == []
    assert [len(texts) for texts in load.texts.values()] == [1, 1, 1]


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
def test_rolling_update_under_load_loses_no_request(fleet: RunningFleet) -> None:
    before = {server["pid"] for server in fleet.status()["servers"]}
    load = Load(fleet.url)
    fleet.write(seqs=8)
    fleet.command("up", str(fleet.file))
    load.stop()
    after = {server["pid"] for server in fleet.status()["servers"] if server["is_ready"]}
    assert len(after) == 2 and not after & before
    assert load.failed == []
    assert [len(texts) for texts in load.texts.values()] == [1, 1, 1]


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
def test_down_ends_every_process(fleet: RunningFleet) -> None:
    pids = [server["pid"] for server in fleet.status()["servers"]]
    fleet.command("down")
    assert fleet.process.wait(60) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not fleet.is_ready()
