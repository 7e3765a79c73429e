"""What cannot be read (a directory, a file that vanished, half a file) is one clear sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ridgeline.config.sources import read_config
from ridgeline.engine.checkpoints.safetensors import entries_of
from ridgeline.engine.generation_config import read_sampling_defaults
from ridgeline.engine.tokenization.tokenizer import load_tokenizer
from ridgeline.errors import UserError
from ridgeline.measure.results.event_log import read_log
from ridgeline.measure.results.readers import read_result
from ridgeline.measure.workload.jsonl import read_workload
from ridgeline.modelspec.checkpoints.gguf_header import read_gguf
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import model_path
from ridgeline.plan.calibration.calibration import load_calibration
from ridgeline.serve.auth.keys import load_keys
from ridgeline.workflows.optimize.optimize import ladder_of
from tests.fuzz.targets import TARGETS

DEMO = model_path("demo")
FILES: dict[str, Callable[[Path], object]] = {
    "ridgeline.toml": read_config,
    "ladder.toml": ladder_of,
    "keys.toml": lambda path: load_keys(None, str(path)),
    "run.jsonl": read_log,
    "result.json": read_result,
    "workload.jsonl": read_workload,
    "calibration.json": load_calibration,
    "model.gguf": lambda path: read_gguf(str(path)),
}
MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
               "model.safetensors")  # fmt: skip


def check_sentence(error: UserError) -> None:
    text = str(error)
    assert "\n" not in text and "Traceback" not in text and len(text) < 2500, text


def read_all(folder: Path) -> None:
    load_spec(str(folder))
    read_sampling_defaults(str(folder))
    load_tokenizer(str(folder))
    entries_of(folder)


def replace(path: Path, how: str) -> None:
    data = path.read_bytes()
    path.unlink()
    if how == "directory":
        path.mkdir()
    elif how == "vanished":
        path.symlink_to(path.with_name("gone"))
    elif how == "half":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.write_bytes(b"")


@pytest.mark.parametrize("how", ["directory", "vanished"])
@pytest.mark.parametrize("name", FILES)
def test_unreadable_file_is_refused_with_a_sentence(name: str, how: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"x")
    replace(path, how)
    with pytest.raises(UserError) as caught:
        FILES[name](path)
    check_sentence(caught.value)


@pytest.mark.parametrize("how", ["directory", "vanished", "half", "empty"])
@pytest.mark.parametrize("name", MODEL_FILES)
def test_damaged_model_directory_is_read_or_refused(name: str, how: str, tmp_path: Path) -> None:
    for file in DEMO.iterdir():
        if file.name in MODEL_FILES:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    read_all(tmp_path)
    replace(tmp_path / name, how)
    try:
        read_all(tmp_path)
    except UserError as error:
        check_sentence(error)
    else:  # optional files may be missing
        assert name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json")


@pytest.mark.parametrize("target", ["gguf", "safetensors", "event_log", "workload", "result"])
def test_every_truncation_of_a_file_is_read_or_refused(target: str, tmp_path: Path) -> None:
    data = TARGETS[target].seeds()[0]
    for size in range(0, len(data), max(1, len(data) // 60)):
        folder = tmp_path / str(size)
        folder.mkdir()
        try:
            TARGETS[target].read(folder, data[:size])
        except UserError as error:
            check_sentence(error)
