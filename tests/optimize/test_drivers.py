"""Applying configurations to servers that exist, with programs that behave like the real ones."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
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

from ridgeline.errors import BadInput, CannotRun, UserError
from ridgeline.optimize.drivers import in_place, slurm
from ridgeline.optimize.drivers.apply_command import flag_values
from ridgeline.optimize.drivers.base import Change, Driver
from ridgeline.optimize.drivers.docker import DockerContainer
from ridgeline.optimize.drivers.kubernetes import copy as kubernetes_copy
from ridgeline.optimize.drivers.kubernetes.copy import copy_manifest
from ridgeline.optimize.drivers.kubernetes.workload import KubernetesWorkload
from ridgeline.optimize.drivers.ray_serve import engine_arguments
from ridgeline.optimize.drivers.server_process import free_port
from ridgeline.optimize.drivers.shell import join_lines, run, shell_line
from ridgeline.workflows.optimize.server_driver import RestartableServer, open_driver
from tests.optimize import fake_tools

TOOLS = Path(fake_tools.__file__)


@pytest.mark.parametrize(
    ("command", "joined"),
    [
        ("vllm serve m \\\n  --port 8000 \\\r\n {flags}", "vllm serve m   --port 8000  {flags}"),
        ('sh -c "a \\\n b"', 'sh -c "a  b"'),
        ("sh -c 'a \\\n b'", "sh -c 'a \\\n b'"),
        ("a\\\\\n b \\n", "a\\\\\n b \\n"),
        ("""it\\'s \\\nx "don't \\\n" '""", """it\\'s x "don't " '"""),
    ],
)
def test_a_backslash_at_a_line_end_continues_the_command_as_in_a_shell(
    command: str, joined: str
) -> None:
    assert join_lines(command) == joined


def test_every_command_of_a_server_may_have_several_lines() -> None:
    lines = "vllm serve m \\\n--port 1 {flags}"
    given = RestartableServer(url="http://h", restart_cmd=lines, candidate_commands=(lines,))
    assert given.restart_cmd == "vllm serve m --port 1 {flags}"
    assert given.candidate_commands == (given.restart_cmd,)
    measured = RestartableServer(
        url="http://h", server_cmd="vllm serve m \\\n-x", eval_cmd="pytest \\\n--url {url}"
    )
    assert (measured.server_cmd, measured.eval_cmd) == ("vllm serve m -x", "pytest --url {url}")


class Place:
    """A folder with the state of the fake programs and a server that runs."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port, self.url = folder, port, f"http://127.0.0.1:{port}"
        self.words = ["m", "--port", str(port), "--max-num-seqs", "4"]

    @property
    def state(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "state.json").read_text()))

    def write(self, **values: object) -> None:
        file = self.folder / "state.json"
        old = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**old, **values}))

    def calls(self, *begin: str) -> list[list[str]]:
        return [row for row in self.state["calls"] if tuple(row[: len(begin)]) == begin]

    def arguments(self) -> list[str]:
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as reply:
            return list(json.load(reply)["arguments"])

    def log(self) -> Path:
        return self.folder / "driver.log"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in fake_tools.TOOLS:
        script = programs / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {TOOLS} {name} "$@"\n')
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_TOOLS", str(tmp_path))
    monkeypatch.setattr(fake_tools, "FOLDER", tmp_path)
    monkeypatch.setattr(in_place, "POLL_S", 0.05)
    monkeypatch.setattr(slurm, "POLL_S", 0.05)
    yield Place(tmp_path, free_port())
    pids = tmp_path / "pids"
    for line in pids.read_text().split() if pids.exists() else ():
        with suppress(ProcessLookupError):
            os.killpg(int(line), signal.SIGKILL)
    for process in fake_tools.STARTED:
        process.wait()
    fake_tools.STARTED.clear()


def await_models(place: Place) -> None:
    for _ in range(100):
        with suppress(OSError):
            place.arguments()
            return
        time.sleep(0.05)
    raise AssertionError("the server did not start")


def in_kubernetes(place: Place) -> RestartableServer:
    sidecar = {"name": "proxy", "image": "envoy"}
    server = {"name": "vllm", "command": ["vllm", "serve"], "args": place.words}
    place.write(
        pid=fake_tools.launch(place.words),
        workload={
            "metadata": {"name": "chat", "generation": 1},
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": {"app": "chat"}},
                "template": {"spec": {"containers": [sidecar, server]}},
            },
        },
        pods=[{"name": "chat-0", "container": server, "ready": True, "stuck": "", "ended": False}],
    )
    return RestartableServer(url=place.url, kubernetes="prod/chat", start_timeout_s=8)


def in_docker(place: Place) -> RestartableServer:
    config = {
        "Image": "vllm/vllm-openai:v0.33",
        "Entrypoint": ["vllm", "serve"],
        "Cmd": place.words,
        "Env": ["PATH=/bin", "HF_TOKEN=secret"],
        "Hostname": "0123",
    }
    host = {
        "Binds": ["/models:/models:ro"],
        "IpcMode": "host",
        "ShmSize": 67108864,
        "NetworkMode": "compose_default",
        "PortBindings": {"8000/tcp": [{"HostIp": "", "HostPort": "8000"}]},
        "DeviceRequests": [{"Count": -1, "Capabilities": [["gpu"]]}],
    }
    document = {
        "Id": "0123",
        "Image": "sha256:1",
        "Config": config,
        "HostConfig": host,
        "Mounts": [
            {"Type": "bind", "Source": "/models", "Destination": "/models"},
            {"Type": "volume", "Name": "cache", "Destination": "/var/cache/hf", "RW": True},
        ],
        "NetworkSettings": {"Networks": {"compose_default": {"Aliases": ["vllm", "0123"]}}},
    }
    words = ["vllm", "serve", *place.words]
    row = {"document": document, "words": words, "pid": fake_tools.launch(words)}
    image = {
        "RepoTags": ["vllm/vllm-openai:v0.33"],
        "Config": {"Entrypoint": ["vllm", "serve"], "Env": ["PATH=/bin"]},
    }
    place.write(containers={"vllm": row}, image=image)
    return RestartableServer(url=place.url, docker="vllm", start_timeout_s=4)


def in_ray(place: Place) -> RestartableServer:
    config = place.folder / "serve.yaml"
    config.write_text(
        """{"applications": [{"name": "llm", "import_path": "ray.serve.llm:build_openai_app",
        "args": {"llm_configs": [{"model_loading_config": {"model_id": "m"},
        "engine_kwargs": {"max_num_seqs": 4}}]}}]}"""
    )
    place.write(
        pid=fake_tools.launch(place.words),
        port=place.port,
        application={"status": "RUNNING"},
    )
    return RestartableServer(url=place.url, ray=config, start_timeout_s=4)


SCRIPT = """
import json, os, sys
sys.path.insert(0, {root!r})
from tests.optimize import fake_tools
document = json.load(open(os.environ["RIDGELINE_CONFIG"]))
file = fake_tools.FOLDER / "state.json"
state = json.loads(file.read_text())
state["calls"].append(["apply", os.environ["RIDGELINE_ACTION"], document])
words = document["command"]
if "--fail" in words:
    file.write_text(json.dumps(state))
    sys.exit("ansible: task restart failed")
fake_tools.kill(state["pid"])
state["pid"] = fake_tools.launch(words)
file.write_text(json.dumps(state))
"""


def by_script(place: Place) -> RestartableServer:
    script = place.folder / "apply.py"
    script.write_text(SCRIPT.format(root=str(TOOLS.parents[2])))
    place.write(pid=fake_tools.launch(place.words), calls=[])
    return RestartableServer(
        url=place.url,
        apply_cmd=f"{sys.executable} {script}",
        server_cmd=shlex.join(["vllm", "serve", *place.words]),
        start_timeout_s=4,
    )


IN_PLACE = [in_kubernetes, in_docker, in_ray, by_script]
Make = Callable[[Place], RestartableServer]


def driver_of(place: Place, make: Make, lines: list[str] | None = None) -> Driver:
    server = make(place)
    await_models(place)
    report = [].append if lines is None else lines.append  # type: ignore[var-annotated]
    return open_driver(server, place.folder, report)[1]


@pytest.mark.slow
@pytest.mark.parametrize("make", IN_PLACE)
def test_configuration_is_applied_and_the_former_one_restored(place: Place, make: Make) -> None:
    lines: list[str] = []
    with driver_of(place, make, lines) as driver:
        former = place.arguments()
        baseline = driver.configure([], place.log())
        candidate = driver.configure(["--max-num-seqs", "64"], place.log())
        baseline.start()
        assert place.arguments() == former, "the baseline is the server as it runs"
        assert not (place.folder / "restore.sh").exists()
        starts = candidate.num_starts
        candidate.start()
        assert candidate.is_up and not baseline.is_up
        assert candidate.num_starts != starts
        assert "64" in place.arguments() and "4" not in place.arguments()
        assert (place.folder / "restore.sh").exists()
        baseline.start()
        assert place.arguments() == former
        candidate.start()
    await_models(place)
    assert place.arguments() == former
    assert not (place.folder / "restore.sh").exists()
    assert any("restored" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("make", IN_PLACE)
def test_failing_start_restores_and_says_so(place: Place, make: Make) -> None:
    with driver_of(place, make) as driver:
        former = place.arguments()
        with pytest.raises(CannotRun, match="former configuration was restored") as caught:
            driver.configure(["--fail"], place.log()).start()
        await_models(place)
        assert place.arguments() == former
    words = {by_script: "task restart failed", in_ray: "engine died"}.get(make, "no such weights")
    assert words in str(caught.value)
    assert not (place.folder / "restore.sh").exists()


@pytest.mark.slow
@pytest.mark.parametrize("make", [in_kubernetes, in_docker])
def test_start_that_never_answers_ends_at_its_limit(place: Place, make: Make) -> None:
    server = make(place)
    await_models(place)
    limited = RestartableServer(
        url=server.url, kubernetes=server.kubernetes, docker=server.docker, start_timeout_s=0.6
    )
    _, driver = open_driver(limited, place.folder, print)
    with driver, pytest.raises(CannotRun, match="not ready in 1 s"):
        driver.configure(["--hang"], place.log()).start()
    await_models(place)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--no-image", "ImagePullBackOff: Back-off pulling image"),
        ("--no-room", "Insufficient nvidia.com/gpu"),
    ],
)
def test_pods_that_cannot_start_are_named(place: Place, flag: str, words: str) -> None:
    server = in_kubernetes(place)
    await_models(place)
    limited = RestartableServer(url=server.url, kubernetes=server.kubernetes, start_timeout_s=0.6)
    _, driver = open_driver(limited, place.folder, print)
    with driver, pytest.raises(CannotRun, match=words):
        driver.configure([flag], place.log()).start()
    assert place.state["workload"]["spec"]["template"]["spec"]["containers"][1]["args"] == (
        place.words
    )


@pytest.mark.slow
def test_change_by_someone_else_is_not_overwritten(place: Place) -> None:
    server = msgspec.structs.replace(in_kubernetes(place), start_timeout_s=1)
    await_models(place)
    with open_driver(server, place.folder, print)[1] as driver:
        state = place.state
        workload = state["workload"]
        theirs = [*place.words, "--theirs"]
        workload["spec"]["template"]["spec"]["containers"][1]["args"] = theirs
        place.write(workload=workload)
        with pytest.raises(CannotRun, match="changed by someone else"):
            driver.configure(["--max-num-seqs", "8"], place.log()).start()
    containers = place.state["workload"]["spec"]["template"]["spec"]["containers"]
    assert containers[1]["args"] == theirs


@pytest.mark.slow
def test_interruption_while_a_start_is_awaited_restores(place: Place) -> None:
    """The first Ctrl-C of asyncio.run only cancels the task, which blocks in the wait."""

    async def search(driver: Driver) -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop()
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        signal.signal(signal.SIGALRM, lambda *_: task.cancel())
        driver.configure(["--hang"], place.log()).start()

    with driver_of(place, in_kubernetes) as driver:
        former = place.arguments()
        with pytest.raises((asyncio.CancelledError, KeyboardInterrupt)):
            asyncio.run(search(driver))
    await_models(place)
    assert place.arguments() == former


KILLED = """
import os, signal, sys
from pathlib import Path
from ridgeline.optimize.drivers import in_place
from ridgeline.workflows.optimize.server_driver import RestartableServer, open_driver
in_place.POLL_S = 0.05
folder = Path({folder!r})
driver = open_driver({server}, folder, lambda line: None)[1].__enter__()
driver.configure(["--max-num-seqs", "64"], folder / "log").start()
print("applied", flush=True)
signal.pause()
"""


@pytest.mark.slow
@pytest.mark.parametrize("make", [in_kubernetes, in_docker, by_script])
def test_killed_process_leaves_the_former_configuration(place: Place, make: Make) -> None:
    server = make(place)
    await_models(place)
    former = place.arguments()
    code = KILLED.format(folder=str(place.folder), server=repr(server))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "applied\n"
    assert place.arguments() != former
    process.kill()
    process.communicate()
    for _ in range(100):
        with suppress(OSError):
            if place.arguments() == former:
                break
        time.sleep(0.05)
    else:
        pytest.fail("the former configuration is not back")


@pytest.mark.slow
def test_restore_that_fails_names_the_script(place: Place) -> None:
    lines: list[str] = []
    with driver_of(place, in_docker, lines) as driver:
        driver.configure(["--max-num-seqs", "64"], place.log()).start()
        containers = place.state["containers"]
        fake_tools.kill(containers["vllm-ridgeline"]["pid"])
        place.write(containers={})
    assert any("could NOT be restored" in line and "restore.sh" in line for line in lines)
    assert (place.folder / "restore.sh").exists()


@pytest.mark.slow
def test_container_is_made_again_with_everything_it_has(place: Place) -> None:
    with driver_of(place, in_docker) as driver:
        driver.configure(["--max-num-seqs", "64"], place.log()).start()
        row = place.state["containers"]["vllm-ridgeline"]
    text = shlex.join(row["options"])
    for option in (
        "--volume /models:/models:ro",
        "--mount type=volume,source=cache,target=/var/cache/hf",
        "--ipc host",
        "--shm-size 67108864",
        "--publish 8000:8000/tcp",
        "--network compose_default --network-alias vllm",
        "--gpus all",
        "--env HF_TOKEN",
    ):
        assert option in text
    assert "0123" not in text and "secret" not in text and "--env PATH" not in text
    assert row["document"]["Config"]["Env"][0] == "HF_TOKEN=secret"
    assert row["words"] == ["vllm", "serve", *place.words[:-1], "64"]


def docker_with(place: Place, **host: object) -> DockerContainer:
    in_docker(place)
    containers = place.state["containers"]
    containers["vllm"]["document"]["HostConfig"] |= host
    place.write(containers=containers)
    return DockerContainer("vllm")


@pytest.mark.parametrize(
    ("host", "named"),
    [({"AutoRemove": True}, "--rm"), ({"Links": ["a:b"]}, "--link")],
)
def test_container_that_cannot_be_made_again_is_refused(
    place: Place, host: dict[str, object], named: str
) -> None:
    with pytest.raises(CannotRun, match=named):
        docker_with(place, **host).read_command()


def test_entrypoint_joined_by_podman_is_taken_from_the_image(place: Place) -> None:
    control = docker_with(place)
    containers = place.state["containers"]
    containers["vllm"]["document"]["Config"]["Entrypoint"] = "vllm serve"
    place.write(containers=containers)
    assert control.read_command() == ("vllm", "serve", *place.words)
    commands = control.change_commands(Change((), ("vllm", "serve", "m")))
    assert "--entrypoint" not in commands[1].words


def test_container_of_someone_else_is_not_removed(place: Place) -> None:
    control = docker_with(place)
    control.read_command()
    containers = place.state["containers"]
    document = {"Config": {}, "HostConfig": {}, "Image": "sha256:2"}
    containers["vllm-ridgeline"] = {"document": document, "words": [], "pid": None}
    place.write(containers=containers)
    with pytest.raises(CannotRun, match="not Ridgeline's"):
        control.restore()
    assert "vllm-ridgeline" in place.state["containers"]


@pytest.mark.parametrize("text", ["chat", "a/b/c", "prod/daemonset/chat", "prod//chat"])
def test_place_in_kubernetes_is_checked(text: str) -> None:
    with pytest.raises(BadInput, match="NAMESPACE/NAME"):
        KubernetesWorkload(text)


def test_server_started_by_a_shell_is_refused(place: Place) -> None:
    in_kubernetes(place)
    workload = place.state["workload"]
    workload["spec"]["template"]["spec"]["containers"][1] = {
        "name": "vllm",
        "command": ["sh", "-c"],
        "args": ["vllm serve m"],
    }
    place.write(workload=workload)
    with pytest.raises(CannotRun, match="--apply-cmd"):
        KubernetesWorkload("prod/deployment/chat/vllm").read_command()


# ---- a copy of a Deployment --------------------------------------------------------------------


def test_copy_has_a_service_and_no_label_of_the_original() -> None:
    container = {"name": "vllm", "args": ["m", "--port=9001"], "ports": [{"containerPort": 1}]}
    template = {
        "metadata": {"labels": {"app": "chat"}, "annotations": {"mesh": "on"}},
        "spec": {"containers": [container], "volumes": [{"name": "w"}]},
    }
    original = {
        "metadata": {"name": "chat", "namespace": "prod", "uid": "1", "resourceVersion": "7"},
        "spec": {"replicas": 3, "selector": {"matchLabels": {"app": "chat"}}, "template": template},
        "status": {"replicas": 3},
    }
    copy, service = copy_manifest(original, "vllm")
    assert copy["metadata"] == {
        "name": "chat-ridgeline",
        "namespace": "prod",
        "labels": {"ridgeline/copy-of": "chat"},
    }
    spec = copy["spec"]
    assert spec["replicas"] == 1 and spec["strategy"] == {"type": "Recreate"}
    assert spec["template"]["metadata"]["labels"] == spec["selector"]["matchLabels"]
    assert "app" not in spec["template"]["metadata"]["labels"]
    assert spec["template"]["metadata"]["annotations"] == {"mesh": "on"}
    assert spec["template"]["spec"] == template["spec"]
    assert service["spec"]["selector"] == {"ridgeline/copy-of": "chat"}
    assert service["spec"]["ports"] == [{"name": "http", "port": 9001, "targetPort": 9001}]
    assert "status" not in copy and "uid" not in copy["metadata"]


def on_a_copy(place: Place) -> RestartableServer:
    in_kubernetes(place)
    return RestartableServer(
        url="http://127.0.0.1:{port}", kubernetes="prod/chat", start_timeout_s=8
    )


@pytest.mark.slow
def test_configurations_are_tried_on_a_copy_that_is_deleted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setattr(kubernetes_copy, "free_port", lambda: port)
    server = on_a_copy(place)
    place.write(forwarded=port)
    await_models(place)
    lines: list[str] = []
    _, driver = open_driver(server, place.folder, lines.append)
    assert not place.state.get("copy")
    with driver:
        baseline = driver.configure([], place.log())
        baseline.start()
        assert baseline.url == f"http://127.0.0.1:{port}"
        assert place.state["copy"]["service"]["kind"] == "Service"
        driver.configure(["--max-num-seqs", "64"], place.log()).start()
        with urllib.request.urlopen(f"{baseline.url}/v1/models") as reply:
            assert "64" in json.load(reply)["arguments"]
        with pytest.raises(CannotRun, match="no such weights"):
            driver.configure(["--fail"], place.log()).start()
        assert "delete" in (place.folder / "restore.sh").read_text()
        assert place.arguments() == place.words[1:], "the original keeps serving"
    assert place.state["copy"] is None
    assert not (place.folder / "restore.sh").exists()
    assert place.arguments() == place.words[1:]
    assert not [row for row in place.calls("kubectl") if "patch" in row and "chat" in row]
    assert any("was not changed" in line for line in lines)


@pytest.mark.slow
def test_deployment_of_someone_else_is_not_taken_for_the_copy(place: Place) -> None:
    server = on_a_copy(place)
    other = {"workload": {"metadata": {"name": "chat-ridgeline", "generation": 1}}, "pods": []}
    other["workload"]["spec"] = place.state["workload"]["spec"]  # type: ignore[index]
    place.write(copy={**other, "pid": None})
    _, driver = open_driver(server, place.folder, print)
    with pytest.raises(CannotRun, match="not Ridgeline's"), driver:
        pass
    assert place.state["copy"] is not None


def test_copy_is_addressed_by_its_service_in_the_cluster(place: Place) -> None:
    in_kubernetes(place)
    server = RestartableServer(url="http://{service}:8000", kubernetes="prod/chat")
    command, _ = open_driver(server, place.folder, print)
    assert command.url == "http://chat-ridgeline.prod:8000"


# ---- jobs --------------------------------------------------------------------------------------

JOB = """#!/bin/sh
#SBATCH --gres=gpu:1
export HF_HOME="$SCRATCH/hf"
srun vllm serve m --port {port} \\
    --max-num-seqs 4 {flags}
"""


def as_job(place: Place) -> RestartableServer:
    script = place.folder / "serve.sbatch"
    script.write_text(JOB)
    place.write(jobs={})
    return RestartableServer(url="http://{node}:{port}", slurm=script, start_timeout_s=4)


@pytest.mark.slow
def test_two_jobs_run_side_by_side_and_are_cancelled(place: Place) -> None:
    command, driver = open_driver(as_job(place), place.folder, print)
    assert command.command.startswith("srun vllm serve m --port {port}")
    with driver:
        a, b = (
            driver.configure(flags, place.folder / f"{flags[-1]}.log")
            for flags in (
                ["--max-num-seqs", "8"],
                ["--seed", "1"],
            )
        )
        a.start()
        b.start()
        assert a.is_up and b.is_up and a.url != b.url
        assert a.url.startswith("http://127.0.0.1:")
        assert "scancel" in (place.folder / "restore.sh").read_text()
        a.stop()
        assert not a.is_up
    jobs = place.state["jobs"].values()
    assert all(job["cancelled"] for job in jobs)
    scripts = [job["script"] for job in jobs]
    assert "--max-num-seqs 8" in scripts[0] and "--max-num-seqs 4" not in scripts[0]
    assert "--max-num-seqs 4 --seed 1" in scripts[1]
    assert all("$SCRATCH" in script and "{" not in script for script in scripts)
    assert not (place.folder / "restore.sh").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "words"), [("--fail", "no such weights"), ("--no-room", "still PENDING")]
)
def test_job_that_does_not_start_is_cancelled_and_named(
    place: Place, flag: str, words: str
) -> None:
    server = as_job(place)
    limited = RestartableServer(url=server.url, slurm=server.slurm, start_timeout_s=0.5)
    _, driver = open_driver(limited, place.folder, print)
    with driver, pytest.raises(CannotRun, match=words):
        driver.configure([flag], place.log()).start()
    assert all(job["cancelled"] for job in place.state["jobs"].values())


@pytest.mark.parametrize("text", ["vllm serve m", "a {flags}\nb {flags}", "vllm --x={flags}"])
def test_job_script_without_one_place_for_flags_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "job"
    file.write_text(text)
    with pytest.raises(BadInput, match=r"\{flags\}"):
        slurm.SlurmScript(file)


def test_short_flag_of_a_job_is_replaced_where_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "job"
    file.write_text('srun vllm serve "$MODEL" {flags} -tp 8 --port 1\n')
    text = slurm.SlurmScript(file).render(["--tensor-parallel-size", "4"], None)
    assert text.strip() == 'srun vllm serve "$MODEL" --tensor-parallel-size 4 --port 1'


# ---- small parts -------------------------------------------------------------------------------


def test_flags_as_documents() -> None:
    words = ["--a", "1", "--switch", "--b=2", "--many", "x", "y", "--no-c", "--json", '{"k": 1}']
    values = flag_values(words)
    assert values == {
        "--a": "1",
        "--switch": True,
        "--b": "2",
        "--many": ["x", "y"],
        "--no-c": True,
        "--json": '{"k": 1}',
    }
    assert engine_arguments({"--max-num-seqs": "8", "--no-c": True, "--json": '{"k": 1}'}) == {
        "max_num_seqs": 8,
        "c": False,
        "json": {"k": 1},
    }


def test_command_that_hangs_or_is_missing_is_an_error() -> None:
    with pytest.raises(CannotRun, match="did not finish"):
        run(["sleep", "9"], timeout_s=0.1)
    with pytest.raises(CannotRun, match="not on PATH"):
        run(["no-such-program"])
    with pytest.raises(CannotRun, match=r"exit code 3.*went wrong"):
        run(["sh", "-c", "echo went wrong >&2; exit 3"])


def test_two_ways_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--docker and --kubernetes"):
        RestartableServer(url="http://h", docker="a", kubernetes="b/c")
    with pytest.raises(UserError, match=r"\{port\}"):
        RestartableServer(url="http://h:{port}", docker="a")
    with pytest.raises(UserError, match="--server-cmd"):
        server = RestartableServer(url="http://h", apply_cmd="a")
        open_driver(server, tmp_path, print)


@pytest.mark.slow
@pytest.mark.parametrize("make", [*IN_PLACE, as_job])
def test_plan_changes_nothing(place: Place, make: Make) -> None:
    server = make(place)
    before = place.state
    _, driver = open_driver(server, place.folder, print)
    lines = [shell_line(command) for command in driver.plan(["--max-num-seqs", "64"])]
    lines += [shell_line(command) for command in driver.plan_restore()]
    assert lines
    assert "64" in " ".join(lines) or make is as_job
    changing = {"patch", "run", "stop", "rm", "deploy", "sbatch", "apply"}
    done = place.state.get("calls", [])
    assert not [row for row in done if changing & set(row)]
    assert {**place.state, "calls": 0} == {**before, "calls": 0}
