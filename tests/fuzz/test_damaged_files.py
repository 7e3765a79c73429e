"""Damaged files of interrupted runs, caches and other programs: a sentence that names the file."""

from __future__ import annotations

import errno
import http.server
import io
import os
import resource
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from ridgeline.compress.adam import AdamState
from ridgeline.compress.distill.distill_model import _read_curve
from ridgeline.compress.distill.teacher_cache import TeacherCache
from ridgeline.compress.prune.pruned_layers import PrunedLayers, stored_choice
from ridgeline.compress.unfinished import file_of_interrupted_run
from ridgeline.compress.writers.store import open_folder
from ridgeline.engine.checkpoints.sources import PlainWeights
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.errors import CannotRun, DoesNotFit, UserError
from ridgeline.fleet.ray.child_process import is_ready
from ridgeline.fleet.ray.scaling import read_gateway
from ridgeline.fleet.ray.server_table import ServerTable
from ridgeline.hub.names import HubModel
from ridgeline.hub.repository_files import INDEX, find_snapshot
from ridgeline.optimize.drivers.docker import DockerContainer
from ridgeline.optimize.drivers.kubernetes.copy import _Owned
from ridgeline.optimize.drivers.kubernetes.workload import KubernetesWorkload
from ridgeline.optimize.drivers.server_process import answers
from ridgeline.optimize.drivers.shell import parse_json, run
from ridgeline.optimize.external.server_deployment import (
    post_blocking,
    read_late_s,
    read_settings,
)
from ridgeline.workflows.evaluate.evaluate_servers import (
    ServerToCompare,
    _scorer,
    recognise_server,
)
from ridgeline.workflows.evaluate.lm_eval import read_samples
from ridgeline.workflows.load.live_traffic import read_traffic
from ridgeline.workflows.load.twin_servers import read_twin
from ridgeline.workflows.optimize.server_environment import _first_model
from ridgeline.workflows.own_text import _stored_at, _stored_or_written

CONTENTS = {
    "no text": b"\xff\xfe[1]",
    "half": b'[{"step": 1, "num_to',
    "deep": b"[" * 20_000 + b"]" * 20_000,
    "long number": b"1" * 5000,
    "infinite number": b'{"step": 1e400}',
    "text": b'"text"',
    "null": b"null",
    "null in a list": b"[null]",
    "wrong types": b'{"weight_map": {"a": [1]}, "arguments": 1, "tokens": "a", "metrics": 1}',
    "list for an object": b'{"weight_map": [1], "metrics": [[1]], "data": {}}',
}


def _choice(folder: Path) -> object:
    return stored_choice(folder, 4)


def _index(folder: Path) -> object:
    model = HubModel(repo="org/model")
    constants_folder = folder.parents[2]
    (constants_folder / "models--org--model" / "refs").mkdir(exist_ok=True)
    (constants_folder / "models--org--model" / "refs" / "main").write_text(folder.name)
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        (folder / name).write_bytes(b"{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(constants_folder))
        return find_snapshot(model)


def _moments(folder: Path) -> object:
    state = AdamState({"w": torch.nn.Parameter(torch.zeros(2))})
    return state.load(folder)


def _teacher(folder: Path) -> object:
    return TeacherCache(folder, torch.zeros(1, 4, dtype=torch.long), 2)[0]


class _NoWeights(PlainWeights):
    def get(self, part: Part) -> torch.Tensor:
        raise AssertionError


def _report(folder: Path) -> object:
    return PrunedLayers(folder, _NoWeights()).report(0)


def _samples(folder: Path) -> object:
    return read_samples(folder)


def _own_text(folder: Path) -> object:
    return _stored_or_written(folder / "model", {"seed": 1}, list)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "layers that a pruning keeps": ("kept_layers.json", _choice),
    "curve of a distillation": ("curve.json", _read_curve),
    "index of a cached model": (INDEX, _index),
    "text that a model wrote": (_stored_at(Path("model")).name, _own_text),
    "moments of a training": ("checkpoint.safetensors", _moments),
    "logits of a teacher": ("teacher-00000.safetensors", _teacher),
    "layer of a pruning": ("layer-00000.safetensors", _report),
    "samples of lm-eval": ("samples_arc_2026.jsonl", _samples),
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("reader", READERS)
def test_damaged_file_is_refused_by_name(reader: str, content: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    folder = tmp_path / "models--org--model" / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (folder / name).write_bytes(CONTENTS[content])
    with pytest.raises(UserError) as refusal:
        read(folder)
    text = str(refusal.value)
    assert name in text and "\n" not in text and len(text) < 2000, text


@pytest.mark.parametrize("kept", [b"[0, 4]", b"[-1, 2]", b"[2, 1]", b"[1, 1]", b"[0.5]", b"[true]"])
def test_layers_that_are_not_the_models_are_refused(kept: bytes, tmp_path: Path) -> None:
    (tmp_path / "kept_layers.json").write_bytes(kept)
    with pytest.raises(UserError, match=r"kept_layers\.json"):
        stored_choice(tmp_path, 4)


def test_run_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "run.json").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"run\.json"), open_folder(tmp_path / "out", {}):
        pass


@pytest.mark.parametrize("content", CONTENTS)
def test_table_of_servers_that_is_damaged_is_begun_again(content: str, tmp_path: Path) -> None:
    table = ServerTable(tmp_path / "backends", lambda _url: True)
    table._state_file.write_bytes(CONTENTS[content])
    assert ServerTable(tmp_path / "backends", lambda _url: True).entries() == []


@contextmanager
def page(content: bytes) -> Iterator[str]:
    """The address of a server whose every page is `content`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("content", CONTENTS)
def test_damaged_page_of_a_server_is_refused_by_address(content: str) -> None:
    with page(CONTENTS[content]) as url:
        with pytest.raises(CannotRun, match=r"/v1/models"):
            _first_model(url, None)
        is_object = CONTENTS[content].startswith(b"{")
        assert recognise_server(url) == ("sglang" if is_object else "openai")


@pytest.mark.parametrize("content", ["half", "deep", "long number"])
def test_output_that_is_no_json_is_refused_with_the_command(content: str) -> None:
    with pytest.raises(CannotRun, match="docker inspect x"):
        parse_json(("docker", "inspect", "x"), CONTENTS[content].decode(), list)


TOOLS: dict[str, Callable[[], object]] = {
    "container": lambda: DockerContainer("x", "docker").read_command(),
    "state of a container": lambda: DockerContainer("x", "docker").progress(),
    "deployment": lambda: KubernetesWorkload("prod/x").read_command(),
    "pods": lambda: KubernetesWorkload("prod/x")._all_pods(),
    "labels": lambda: parse_json(("kubectl", "get"), run(("kubectl", "get")), _Owned),
}
SHAPES = {"empty list": b"[]", "empty object": b"{}", "no keys": b"[{}]", "no items": b"[null]"}


@pytest.mark.parametrize("content", [*CONTENTS, *SHAPES])
@pytest.mark.parametrize("tool", TOOLS)
def test_output_of_another_shape_is_refused_with_the_command(
    tool: str, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "output").write_bytes((CONTENTS | SHAPES)[content])
    for name in ("docker", "kubectl"):
        (tmp_path / name).write_text(f"#!/bin/sh\nexec cat {tmp_path}/output\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(CannotRun, match=r"docker inspect|kubectl"):
        TOOLS[tool]()


def test_file_that_may_not_be_read_is_not_to_be_deleted(
    unreachable: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = io.open

    def refusing(file: Any, *args: Any, **options: Any) -> Any:
        if Path(file).parent == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return real(file, *args, **options)

    monkeypatch.setattr("io.open", refusing)
    with pytest.raises(CannotRun, match="let the user read it"):
        unreachable(tmp_path)


def test_file_beyond_the_limit_of_open_files_is_not_to_be_deleted(
    unreachable: Callable[[Path], object], tmp_path: Path
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(CannotRun, match="ulimit -n"):
            unreachable(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("device", ["cpu", "gpu", "python"])
def test_file_that_does_not_fit_the_memory_is_not_to_be_deleted(
    device: str, tmp_path: Path
) -> None:
    with pytest.raises(DoesNotFit, match="free memory"), file_of_interrupted_run(tmp_path):
        if device == "cpu":
            torch.empty(1 << 55)
        raise torch.OutOfMemoryError("CUDA out of memory") if device == "gpu" else MemoryError


@pytest.fixture(params=["layers that a pruning keeps", "moments of a training"])
def unreachable(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Path], object]:
    """Reads a file of an interrupted run that is sound: JSON, or tensors."""
    (tmp_path / "kept_layers.json").write_text("[0, 1]")
    tensors = {f"{kind}.w": torch.zeros(2) for kind in "pmv"}
    save_file(tensors, tmp_path / "checkpoint.safetensors", metadata={"step": "1"})
    read = READERS[str(request.param)][1]
    read(tmp_path)
    return read


RAW = {
    "a port that speaks SSH": b"SSH-2.0-OpenSSH_9.2p1\r\n",
    "no text": b"\xff\x00\xfe",
    "a cut reply": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}",
    "a cut chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{}",
    "cut headers": b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200,
    "a cut refusal": b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{}",
}


@contextmanager
def raw_reply(content: bytes) -> Iterator[str]:
    """The address of a program that answers every connection with `content`, and closes it."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            self.request.sendall(content)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("content", RAW)
def test_replies_that_are_cut_or_not_http_are_refused_or_no_answer(content: str) -> None:
    with raw_reply(RAW[content]) as url:
        for read in (
            lambda: _first_model(url, None),
            lambda: post_blocking(url, "/v1/completions", {}),
            lambda: read_traffic(url, None, 0.0),
            lambda: _scorer(ServerToCompare(url=url)),
        ):
            with pytest.raises(CannotRun) as refusal:
                read()
            assert "\n" not in str(refusal.value)
        assert recognise_server(url) == "openai"
        assert not answers(f"{url}/v1/models") or content == "a cut reply"
        assert read_late_s(url) is None
        assert read_settings(url, {"dtype": "/x#dtype"}) == {}
        assert read_twin(url) is None
        assert read_gateway(url, None) is None
        is_ready(url)
