"""benchmarks/gpu/steps.py says of each figure what computed it."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ridgeline.modelspec.checkpoints.load import load_spec

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "steps.py"
ASKED = argparse.Namespace(context=16, steps=1, copy_bytes_s=1e11)


@pytest.fixture(scope="module")
def steps() -> ModuleType:
    spec = importlib.util.spec_from_file_location("steps", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Runner:
    """Notes what each step could have come from."""

    def __init__(self, graphs: object, pieces: object) -> None:
        self.graphs, self.pieces, self.greedy = graphs, pieces, graphs
        self.seen: set[str] = set()

    def run(self, _: object) -> None:
        self.seen.add("graphs" if self.graphs else "pieces" if self.pieces else "eager")

    def use_graphs(self, graphs: object) -> None:
        self.graphs = self.greedy = graphs


@pytest.mark.parametrize(
    ("graphs", "pieces", "mode", "want"),
    [
        (True, True, "graphs", "graphs"),
        (True, True, "eager", "eager"),
        (False, True, "graphs", "pieces"),
        (False, True, "eager", "eager"),
        (False, False, "graphs", "eager"),
    ],
)
def test_mode_of_a_line_is_what_computed_it(
    steps: ModuleType, graphs: bool, pieces: bool, mode: str, want: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(steps, "device_seconds", lambda _: 1.0)
    runner = Runner(SimpleNamespace() if graphs else None, SimpleNamespace() if pieces else None)
    before = runner.graphs, runner.pieces, runner.greedy
    resolved = SimpleNamespace(spec=load_spec("demo"), block_size=16, num_blocks=8)
    line = steps.time_decode(resolved, SimpleNamespace(runner=runner), 2, ASKED, mode)
    assert line["mode"] == want and runner.seen == {want}
    assert (runner.graphs, runner.pieces, runner.greedy) == before
