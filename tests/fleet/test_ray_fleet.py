"""A fleet on Ray: servers from one command, killed ones, rolling updates, a lost node, the end.

One cluster for all tests, in their order: the start of Ray and of servers takes most of the time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.errors import BadInput
from ridgeline.fleet.ray import deploy
from ridgeline.fleet.ray.fleet_file import read_fleet_file
from tests.fleet.processes import free_port, wait_until

KEY = "key-of-the-fleet"
HEADERS = {"authorization": f"Bearer {KEY}"}
FILE = """
port = {port}
drain_s = 10
[[models]]
model = "demo"
cpus = 0.1
serve = ["--num-threads", "1", "--kv-cache-memory-bytes", "32M", "--max-num-seqs", "{seqs}"]
"""
APART = """
resources = { slot = 1 }
"""
SCALED = f"""{APART}
max_replicas = 2
target_in_flight = 2
stable_s = 6
"""
PACKED = """
rate = 0.1
input_len = 64
output_len = 16
"""
# Of a machine with one L4, so that Ray places what `pack` has placed; nothing runs on a GPU.
RESOURCES = {"CPU": 2, "GPU": 1, "l4": 1, "slot": 1}
# Ray takes a node for dead after three seconds without an answer, in place of fifteen.
HEALTH = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port = 1", "not valid"),
        ("models = []", r"no \[\[models\]\]"),
        ('[[models]]\nmodel = "a"\nreplicas = 0', r"1\.\.10000"),
        ('[[models]]\nmodel = "a"\nreplica = 1', "not valid"),
        ('[[models]]\nmodel = "x/a"\n[[models]]\nmodel = "y/a"', "the same name"),
    ],
)
def test_faulty_fleet_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    with pytest.raises(BadInput, match=message):
        read_fleet_file(path)


def test_path_of_a_model_begins_at_the_files_folder(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    path = tmp_path / "fleet.toml"
    path.write_text('[[models]]\nmodel = "./own"\n[[models]]\nmodel = "demo"')
    own, demo = read_fleet_file(path).models
    assert (own.model, own.name) == (str(tmp_path / "own"), "own")
    assert demo.model == "demo"


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        read_fleet_file(tmp_path / "none.toml")


class RunningFleet:
    """`ridgeline fleet up` as a process."""

    def __init__(self, folder: Path) -> None:
        self.port, self.file = free_port(), folder / "fleet.toml"
        self.output, self.nodes = folder / "output", Nodes()
        self.write(SCALED, seqs=4)
        self.environment = {
            **os.environ,
            "RAY_OVERRIDE_RESOURCES": json.dumps(RESOURCES),
            "CUDA_VISIBLE_DEVICES": "0",
            **HEALTH,
        }
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ridgeline", "fleet", "up", str(self.file)],
                env=self.environment,
                stdout=output,
                stderr=output,
            )

    def write(self, last_lines: str, seqs: int, first_line: str = "") -> None:
        text = FILE.format(port=self.port, seqs=seqs)
        self.file.write_text(first_line + text + last_lines)

    def command(self, *words: str) -> str:
        command = [sys.executable, "-m", "ridgeline", "fleet", *words]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    def status(self) -> dict[str, Any]:
        """What `ridgeline fleet status` asks, without the start of a process."""
        status = deploy.read_status()
        assert status is not None
        return status

    def servers(self) -> dict[int, str]:
        """The models of the servers that are ready, by their processes."""
        return {s["pid"]: s["model"] for s in self.status()["servers"] if s["is_ready"]}

    def view(self) -> dict[str, Any]:
        """What `ridgeline fleet top` shows."""
        words = ["top", "--url", self.url, "--once", "--json"]
        result: dict[str, Any] = json.loads(self.command(*words))
        return result

    def num_ready(self) -> int:
        try:
            view = httpx.get(f"{self.url}/ridgeline/fleet", headers=HEADERS, timeout=2).json()
        except httpx.HTTPError:
            return 0
        return sum(backend["state"] == "ready" for backend in view["backends"])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def has_cluster(self) -> bool:
        """Whether this process is connected to the cluster that `up` starts."""
        assert self.process.poll() is None, self.output.read_text()[-2000:]
        try:
            deploy.connect(None, start=False)
        except Exception:  # whatever Ray says of a cluster that is only starting
            deploy.import_ray().shutdown()
            return False
        return True

    def has_started(self) -> bool:
        assert self.process.poll() is None, self.output.read_text()[-2000:]
        return self.num_ready() >= 1


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder = tmp_path_factory.mktemp("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(folder))
        patch.setenv("RIDGELINE_API_KEY", KEY)
        running = RunningFleet(folder)
        try:
            with warnings.catch_warnings(action="ignore"):  # of Ray's own modules
                deploy.import_ray()
            wait_until(running.has_cluster, 600)
            running.nodes.add()
            wait_until(running.has_started, 600)
            yield running
            running.nodes.stop()
            deploy.import_ray().shutdown()
        finally:
            running.process.send_signal(signal.SIGTERM)
            running.process.wait(120)


@pytest.fixture
def load(fleet: RunningFleet) -> Iterator[Load]:
    clients = Load(fleet.url)
    try:
        yield clients
    finally:
        clients.stop()


class Nodes:
    """Further nodes of the cluster on this machine, each with room for one server."""

    def __init__(self) -> None:
        self.all = list[Any]()

    def add(self) -> Any:
        from ray._private.node import Node
        from ray._private.parameter import RayParams

        size = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 100 << 20}
        ports = {"min_worker_port": 0, "max_worker_port": 0, "node_manager_port": 0}
        gcs = deploy.import_ray().get_runtime_context().gcs_address
        address = {"gcs_address": gcs, "redis_address": gcs}
        parameters = RayParams(
            resources={"slot": 1}, include_log_monitor=False, **size, **ports, **address
        )
        node = Node(parameters, head=False, shutdown_at_exit=True, spawn_reaper=True)
        self.all.append(node)
        return node

    def kill(self, node: Any) -> None:
        """kill -9 of everything on the node."""
        self.all.remove(node)
        node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)

    def stop(self) -> None:
        for node in list(self.all):
            self.kill(node)


class Load:
    """Clients that stream answers until `stop`; `texts` by prompt, and what failed."""

    def __init__(self, url: str) -> None:
        self.url, self.texts, self.failed = url, dict[str, set[str]](), list[str]()
        self.num_answers = 0
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(3)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        body = {"model": "demo", "prompt": f"def f{number}(", "max_tokens": 48, "stream": True}
        with httpx.Client(timeout=120, headers=HEADERS) as client:
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
                self.num_answers += 1

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def check(self) -> None:
        """End it; no request has failed, and each prompt had one answer."""
        self.stop()
        assert self.failed == []
        assert [len(texts) for texts in self.texts.values()] == [1, 1, 1]


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
def test_load_adds_a_server_and_a_killed_one_is_replaced(fleet: RunningFleet, load: Load) -> None:
    wait_until(lambda: fleet.num_ready() == 2, 300)
    before = fleet.servers()
    os.kill(min(before), signal.SIGKILL)
    wait_until(lambda: len(fleet.servers().keys() - {min(before)}) == 2, 300)
    wait_until(lambda: fleet.num_ready() == 2, 60)  # the gateway hears of it after Ray
    load.check()
    assert fleet.view()["counts"]["lost"] == 0


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_on(pid: int, node: Any) -> bool:
    """Whether a server's supervisor is a worker of the node."""
    (raylet,) = node.all_processes["raylet"]
    return parent_of(parent_of(pid)) == raylet.process.pid


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
def test_death_of_a_node_loses_no_stream_and_its_server_moves(
    fleet: RunningFleet, load: Load
) -> None:
    wait_until(lambda: fleet.num_ready() == 2, 300)
    servers, (node,) = fleet.servers(), fleet.nodes.all
    (lost,) = [pid for pid in servers if is_on(pid, node)]
    (kept,) = [pid for pid in servers if pid != lost]
    os.kill(lost, signal.SIGKILL)
    fleet.nodes.kill(node)
    num_before = load.num_answers
    wait_until(lambda: load.num_answers >= num_before + 6)
    assert Path(f"/proc/{kept}").exists()
    other = fleet.nodes.add()
    wait_until(lambda: len(fleet.servers().keys() - {kept, lost}) == 1, 120)
    wait_until(lambda: fleet.num_ready() == 2, 60)
    load.check()
    (moved,) = fleet.servers().keys() - {kept, lost}
    assert is_on(moved, other)
    assert fleet.view()["counts"]["lost"] == 0


def stream_lines(fleet: RunningFleet, num_tokens: int) -> Iterator[str]:
    """The events of a greedy answer."""
    body = {"model": "demo", "prompt": "def f(", "max_tokens": num_tokens, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True}
    url = f"{fleet.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=HEADERS, timeout=120) as reply:
        assert reply.status_code == 200
        yield from (line for line in reply.iter_lines() if line)


def texts_of(lines: Iterable[str]) -> list[str]:
    """Of the events of an answer that is whole."""
    *events, last = [line.removeprefix("data: ") for line in lines]
    assert last == "[DONE]"
    choices = [json.loads(event)["choices"] for event in events]
    return [choice[0]["text"] for choice in choices if choice]


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
def test_killed_supervisor_of_the_gateway_comes_back(fleet: RunningFleet) -> None:
    before, servers = fleet.status()["pid"], fleet.servers()
    lines = stream_lines(fleet, 400)
    first = next(lines)
    os.kill(parent_of(before), signal.SIGKILL)
    texts = texts_of([first, *lines])  # its gateway has ended no stream
    wait_until(lambda: fleet.status()["pid"] != before and fleet.num_ready() > 0, 120)
    assert texts_of(stream_lines(fleet, 400)) == texts
    assert servers.keys() & fleet.servers().keys()


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
def test_killed_gateway_comes_back_and_its_streams_end_in_an_error(fleet: RunningFleet) -> None:
    before = fleet.status()["pid"]
    lines = stream_lines(fleet, 900)
    next(lines)
    os.kill(before, signal.SIGKILL)
    with pytest.raises(httpx.TransportError):
        list(lines)
    wait_until(lambda: fleet.num_ready() > 0, 120)
    assert fleet.status()["pid"] != before
    assert texts_of(stream_lines(fleet, 8))


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
def test_server_that_is_not_needed_leaves(fleet: RunningFleet) -> None:
    wait_until(lambda: fleet.num_ready() == 1, 300)


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
def test_rolling_update_under_load_loses_no_request(fleet: RunningFleet, load: Load) -> None:
    before = fleet.servers()
    fleet.write(APART, seqs=8)
    fleet.command("up", str(fleet.file))
    wait_until(lambda: not fleet.servers().keys() & before.keys(), 120)
    load.check()
    assert len(fleet.servers()) == 1


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
def test_model_with_a_rate_is_placed_on_its_device(fleet: RunningFleet, load: Load) -> None:
    before = fleet.servers()
    fleet.write(PACKED, seqs=8, first_line='stock = "l4=1"')
    fleet.command("up", str(fleet.file))
    wait_until(lambda: not fleet.servers().keys() & before.keys(), 300)
    load.check()
    (pid,) = fleet.servers()
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert b"CUDA_VISIBLE_DEVICES=0" in environment


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
def test_down_ends_every_process(fleet: RunningFleet) -> None:
    shown = json.loads(fleet.command("status", "--json"))["servers"]
    pids = fleet.servers()
    assert pids and pids.items() <= {server["pid"]: server["model"] for server in shown}.items()
    fleet.command("down")
    assert fleet.process.wait(60) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert fleet.num_ready() == 0
