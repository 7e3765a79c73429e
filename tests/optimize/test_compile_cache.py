"""Compiled kernels that outlive a trial: what each driver gives the servers that it starts."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import msgspec
import pytest

from ridgeline.errors import BadInput
from ridgeline.optimize.drivers.base import Change
from ridgeline.optimize.drivers.compile_cache import MOUNTED_AT, CompileCache, mounts_a_cache
from ridgeline.optimize.drivers.docker import DockerContainer
from ridgeline.optimize.drivers.kubernetes.copy import copy_manifest
from ridgeline.optimize.drivers.slurm import SlurmDriver
from ridgeline.optimize.external.server_flags import load_server_flags
from ridgeline.workflows.optimize.server_driver import RestartableServer, open_driver
from tests.optimize.test_drivers import Place, as_job, docker_with, in_docker, place

__all__ = ["place"]  # the fixture of the fake programs

URL = "http://127.0.0.1:{port}"
SERVER = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

kernels = Path(os.environ["VLLM_CACHE_ROOT"]) / "kernels"
print("found the kernels" if kernels.exists() else "compiling", flush=True)
kernels.parent.mkdir(parents=True, exist_ok=True)
kernels.write_text("compiled")

class Models(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "m"}]}')
    def log_message(self, *args): ...

HTTPServer(("127.0.0.1", int(sys.argv[1])), Models).serve_forever()
"""


@pytest.mark.slow
def test_second_trial_finds_what_the_first_has_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    server = RestartableServer(
        url=URL,
        restart_cmd=shlex.join([sys.executable, "-IS", str(script), "{port}"]) + " {flags}",
        server="vllm",
        compile_cache=str(tmp_path / "compiled"),
    )
    _, driver = open_driver(server, tmp_path, print)
    with driver:
        for number in (1, 2):
            trial = driver.configure([f"--seed={number}"], tmp_path / f"server-{number}.log")
            trial.start()
            trial.stop()
    assert "compiling" in (tmp_path / "server-1.log").read_text()
    assert "found the kernels" in (tmp_path / "server-2.log").read_text()
    assert (tmp_path / "compiled" / "vllm" / "kernels").exists()
    shown = dict(driver.plan([])[0].shown_env)
    assert shown["VLLM_CACHE_ROOT"] == str(tmp_path / "compiled" / "vllm")


@pytest.mark.parametrize("server", sorted(load_server_flags()))
def test_variable_that_the_server_has_is_left_as_it_is(server: str) -> None:
    variables = load_server_flags()[server].compile_cache
    assert variables
    cache = CompileCache("/c", variables)
    first = next(iter(variables))
    assert set(cache.environment("/c", ())) == set(variables)
    assert set(cache.environment("/c", (first,))) == set(variables) - {first}
    folders = [value for value in cache.environment("/c", ()).values() if value.startswith("/")]
    assert len(set(folders)) == len(folders) > 0


def test_server_keeps_its_own_cache_without_the_option(tmp_path: Path) -> None:
    server = RestartableServer(url=URL, restart_cmd="vllm serve m --port {port} {flags}")
    command, _ = open_driver(server, tmp_path, print)
    assert command.env == ()


def words_of_run(control: DockerContainer, cache: str) -> str:
    control.keep_compiled(CompileCache(cache, load_server_flags()["vllm"].compile_cache))
    return shlex.join(control.change_commands(Change((), ("vllm", "serve", "m")))[-1].words)


def test_container_mounts_a_folder_or_a_volume(place: Place) -> None:
    control = docker_with(place)
    control.read_command()
    folder = place.folder / "compiled"
    text = words_of_run(control, str(folder))
    assert f"--mount type=bind,source={folder},target={MOUNTED_AT}" in text
    assert "--env VLLM_CACHE_ROOT" in text
    assert folder.stat().st_mode & 0o777 == 0o777, "the container's user may be another one"
    theirs = place.folder / "theirs"
    theirs.mkdir(mode=0o700)
    words_of_run(control, str(theirs))
    assert theirs.stat().st_mode & 0o777 == 0o700, "only a folder that was made here is opened"
    text = words_of_run(control, "volume:kernels")
    assert f"--mount type=volume,source=kernels,target={MOUNTED_AT}" in text


def test_container_without_a_cache_gets_a_volume(place: Place) -> None:
    said: list[str] = []
    server = in_docker(place)
    _, driver = open_driver(server, place.folder, said.append)
    stop, start = driver.plan(["--seed=1"])
    assert "stop" in stop.words
    assert f"type=volume,source=ridgeline-compile-vllm,target={MOUNTED_AT}" in start.words
    assert "--compile-cache none" in said[0]
    server = msgspec.structs.replace(server, compile_cache="none")
    assert MOUNTED_AT not in str(open_driver(server, place.folder, print)[1].plan(["--seed=1"]))


@pytest.mark.parametrize(
    ("folder", "is_cache"),
    [
        ("/opt/app/.cache", True),
        ("/opt/app/.cache/vllm", True),
        ("/opt/app/.triton/", True),
        ("/opt/app/.cache/huggingface", False),
        ("/models", False),
    ],
)
def test_cache_that_a_container_mounts_is_kept(folder: str, is_cache: bool) -> None:
    assert mounts_a_cache(["/data", folder]) == is_cache


def test_volume_is_opened_to_a_user_who_is_not_root(place: Place) -> None:
    control = docker_with(place)
    state = place.state["containers"]
    state["vllm"]["document"]["Config"]["User"] = "1000:1000"
    place.write(containers=state)
    control.read_command()
    text = words_of_run(control, "volume:kernels")
    opened = control.change_commands(Change((), ("vllm", "serve", "m")))[0]
    assert "--user 1000:1000" in text
    assert opened.words[-2:] == ("1777", MOUNTED_AT)
    assert "--user 0:0 --entrypoint chmod" in shlex.join(opened.words)


@pytest.mark.slow
def test_container_that_is_tried_gets_the_variables(place: Place) -> None:
    server = msgspec.structs.replace(in_docker(place), compile_cache="volume:kernels")
    with open_driver(server, place.folder, print)[1] as driver:
        driver.configure(["--max-num-seqs", "64"], place.log()).start()
        row = place.state["containers"]["vllm-ridgeline"]
    assert f"VLLM_CACHE_ROOT={MOUNTED_AT}/vllm" in row["document"]["Config"]["Env"]
    assert "HF_TOKEN=secret" in row["document"]["Config"]["Env"]


@pytest.mark.parametrize(
    ("cache", "volume"),
    [
        ("pvc:kernels", {"persistentVolumeClaim": {"claimName": "kernels"}}),
        ("host:/var/k", {"hostPath": {"path": "/var/k", "type": "DirectoryOrCreate"}}),
    ],
)
def test_copy_mounts_what_outlives_its_pods(cache: str, volume: dict[str, object]) -> None:
    container = {
        "name": "vllm",
        "args": ["--port", "8000"],
        "env": [{"name": "TRITON_CACHE_DIR", "value": "/mine"}],
        "volumeMounts": [{"name": "models", "mountPath": "/models"}],
    }
    pod = {"containers": [{"name": "proxy"}, container], "volumes": [{"name": "models"}]}
    deployment = {"metadata": {"name": "chat"}, "spec": {"template": {"spec": pod}}}
    variables = load_server_flags()["vllm"].compile_cache
    copy, _ = copy_manifest(deployment, "vllm", CompileCache(cache, variables))
    made = copy["spec"]["template"]["spec"]
    assert made["volumes"][0] == {"name": "models"}
    assert made["volumes"][1] == {"name": "ridgeline-compile-cache", **volume}
    proxy, server = made["containers"]
    assert proxy == {"name": "proxy"}
    assert server["volumeMounts"][1]["mountPath"] == MOUNTED_AT
    env = {row["name"]: row["value"] for row in server["env"]}
    assert env["TRITON_CACHE_DIR"] == "/mine"
    assert env["VLLM_CACHE_ROOT"] == f"{MOUNTED_AT}/vllm"
    assert "ridgeline-compile-cache" not in str(deployment), "the original is not changed"


def test_jobs_get_the_variables_from_sbatch(place: Place) -> None:
    cache = place.folder / "compiled"
    server = msgspec.structs.replace(as_job(place), compile_cache=str(cache))
    _, driver = open_driver(server, place.folder, print)
    assert isinstance(driver, SlurmDriver)
    shown = dict(driver.plan([])[0].shown_env)
    assert "VLLM_CACHE_ROOT" in os.environ or shown["VLLM_CACHE_ROOT"] == f"{cache}/vllm"


@pytest.mark.parametrize("cache", ["pvc:kernels", "volume:kernels", "host:/k"])
def test_process_needs_a_folder(cache: str, tmp_path: Path) -> None:
    server = RestartableServer(
        url=URL, restart_cmd="vllm serve m --port {port} {flags}", compile_cache=cache
    )
    with pytest.raises(BadInput, match="cannot reach"):
        open_driver(server, tmp_path, print)


@pytest.mark.parametrize("cache", ["/folder", "pvc:", "host:relative", "volume:v"])
def test_pod_needs_what_outlives_it(cache: str) -> None:
    with pytest.raises(BadInput, match="outlives a pod"):
        CompileCache(cache, {}).volume_of_pod()


def test_process_always_keeps_its_kernels() -> None:
    with pytest.raises(BadInput, match="where the server does"):
        RestartableServer(url=URL, restart_cmd="vllm serve m {port} {flags}", compile_cache="none")


def test_deployment_that_is_changed_in_place_keeps_its_own_cache() -> None:
    with pytest.raises(BadInput, match="needs a copy"):
        RestartableServer(url="http://h", kubernetes="prod/chat", compile_cache="pvc:k")
