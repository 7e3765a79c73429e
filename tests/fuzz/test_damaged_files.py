"""Damaged files of interrupted runs, caches and other programs: a sentence that names the file."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from ridgeline.compress.adam import AdamState
from ridgeline.compress.distill.distill_model import _read_curve
from ridgeline.compress.distill.teacher_cache import TeacherCache
from ridgeline.compress.prune.pruned_layers import PrunedLayers, stored_choice
from ridgeline.compress.writers.store import open_folder
from ridgeline.engine.checkpoints.sources import PlainWeights
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.errors import CannotRun, UserError
from ridgeline.fleet.ray.server_table import ServerTable
from ridgeline.hub.names import HubModel
from ridgeline.hub.repository_files import INDEX, find_snapshot
from ridgeline.optimize.drivers.shell import parse_json
from ridgeline.workflows.evaluate.evaluate_servers import recognise_server
from ridgeline.workflows.evaluate.lm_eval import read_samples
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
        parse_json(("docker", "inspect", "x"), CONTENTS[content].decode())
