"""A fleet on a Ray cluster of several nodes: one server on each, and the death of a node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleet.processes import free_port, wait_until
from tests.fleet.test_ray_fleet import Load, needs_ray

KEY = "key-of-the-fleet"
FILE = """
port = {port}
drain_s = 10
[[models]]
model = "demo"
replicas = 2
cpus = 0.1
resources = {{ slot = 1 }}
serve = ["--num-threads", "1", "--kv-cache-memory-bytes", "32M", "--max-num-seqs", "4"]
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A head that has no room for servers."""
    os.environ["RAY_TMPDIR"] = str(tmp_path_factory.mktemp("ray"))
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 << 20}
    running = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield running
    finally:
        running.shutdown()
        del os.environ["RAY_TMPDIR"]


def add_node(cluster: Any) -> Any:
    """A node with room for one server."""
    size = {"num_cpus": 1, "object_store_memory": 100 << 20}
    return cluster.add_node(resources={"slot": 1}, **size)


class NodesFleet:
    """`ridgeline fleet` on a cluster that runs already."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self._address, self.port = cluster.address, free_port()
        self.file = folder / "fleet.toml"
        self.file.write_text(FILE.format(port=self.port))
        self._environment = {**os.environ, "RIDGELINE_API_KEY": KEY}

    def command(self, *words: str) -> str:
        command = [sys.executable, "-m", "ridgeline", "fleet", *words, "--address", self._address]
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def servers(self) -> list[int]:
        """The processes of the servers that are ready."""
        status: dict[str, Any] = json.loads(self.command("status", "--json"))
        return [server["pid"] for server in status["servers"] if server["is_ready"]]

    def states(self) -> list[str]:
        """Of the gateway's backends."""
        headers = {"authorization": f"Bearer {KEY}"}
        view = httpx.get(f"{self.url}/ridgeline/fleet", headers=headers, timeout=5).json()
        return [backend["state"] for backend in view["backends"]]

    def num_ready(self) -> int:
        return self.states().count("ready")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_on(pid: int, node: Any) -> bool:
    """Whether a server's supervisor is a worker of the node."""
    (raylet,) = node.all_processes["raylet"]
    return parent_of(parent_of(pid)) == raylet.process.pid


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
def test_death_of_a_node_loses_no_stream_and_its_server_moves(cluster: Any, tmp_path: Path) -> None:
    nodes = [add_node(cluster) for _ in range(2)]
    fleet = NodesFleet(cluster, tmp_path)
    fleet.command("up", str(fleet.file))
    servers = fleet.servers()
    assert len(servers) == 2
    (lost,) = [pid for pid in servers if is_on(pid, nodes[0])]
    (kept,) = [pid for pid in servers if is_on(pid, nodes[1])]
    load = Load(fleet.url, KEY)
    try:
        wait_until(lambda: load.num_answers >= 3)
        os.kill(lost, signal.SIGKILL)
        cluster.remove_node(nodes[0], allow_graceful=False)
        before = load.num_answers
        wait_until(lambda: load.num_answers >= before + 6)
        assert Path(f"/proc/{kept}").exists()
        add_node(cluster)
        wait_until(lambda: fleet.num_ready() == 2, 120)
    finally:
        load.stop()
    load.check()
    assert len(fleet.servers()) == 2 and kept in fleet.servers()
    fleet.command("down")
