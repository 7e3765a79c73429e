"""Values that are nested too deeply are refused with a sentence, by every reader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ridgeline.compress.prune.report import REPORT_FILE, read_report
from ridgeline.engine.speculate.drafters.checkpoint import CONFIG, SINGLE, read_config
from ridgeline.errors import UserError
from ridgeline.fleet.ray.fleet_file import read_fleet_file
from ridgeline.plan.calibration.remote_server import load_server_times
from ridgeline.plan.step_time.predict import predict_lines
from ridgeline.serve.caching.routes import read_warm_prompts
from ridgeline.similarity import read_pairs
from ridgeline.workflows.optimize.watch import read_tuned
from tests.fuzz.run import fault_of
from tests.fuzz.targets import TARGETS

DEPTH = 20_000
JSON = {
    "lists": b"[" * DEPTH + b"]" * DEPTH,
    "open lists": b"[" * DEPTH,
    "objects": b'{"a":' * DEPTH + b"1" + b"}" * DEPTH,
    "a list in an object": b'{"a":' + b"[" * DEPTH + b"]" * DEPTH + b"}",
}
TOML = {
    "lists in TOML": b"a = " + b"[" * DEPTH + b"]" * DEPTH,
    "tables in TOML": b"a = " + b"{a = " * DEPTH + b"1" + b"}" * DEPTH,
}
FORMS = {**JSON, **TOML}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("target", TARGETS)
def test_no_format_breaks_at_deep_values(target: str, form: str) -> None:
    for data in (FORMS[form], FORMS[form] + b"\n" + FORMS[form]):
        fault = fault_of(target, data)
        assert fault is None, repr(fault)[:500]


def _in_folder(name: str, read: Callable[[Path], object]) -> Callable[[Path, bytes], object]:
    def read_data(folder: Path, data: bytes) -> object:
        (folder / name).write_bytes(data)
        return read(folder)

    return read_data


def _drafter(folder: Path, data: bytes) -> object:
    (folder / CONFIG).write_bytes(data)
    (folder / SINGLE).write_bytes(b"")
    return read_config(str(folder), "eagle")


READERS: dict[str, Callable[[Path, bytes], object]] = {
    "drafter": _drafter,
    "fleet": _in_folder("f.toml", lambda folder: read_fleet_file(folder / "f.toml")),
    "pairs of questions": _in_folder("p.jsonl", lambda folder: read_pairs(folder / "p.jsonl")),
    "pruning report": _in_folder(REPORT_FILE, read_report),
    "server calibration": _in_folder("c.json", lambda folder: load_server_times(folder / "c.json")),
    "tuned server": _in_folder("ladder.json", read_tuned),
    "warm prompts": _in_folder("w.jsonl", lambda folder: read_warm_prompts(folder / "w.jsonl")),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reader", READERS)
def test_no_other_file_breaks_at_deep_values(reader: str, form: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refusal:
        READERS[reader](tmp_path, FORMS[form])
    assert len(str(refusal.value)) < 2000


@pytest.mark.parametrize("form", JSON)
def test_a_deep_operating_point_is_one_error(form: str) -> None:
    [result] = predict_lines([JSON[form]])
    assert result["error"].startswith("line 1: ")
