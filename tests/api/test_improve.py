"""`quantize`, `evaluate` and `optimize` on the demo model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ridgeline
from ridgeline.api import improve
from ridgeline.config.improve import OptimizeOptions
from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput
from ridgeline.records.progress import ProgressEvent, silent
from ridgeline.workflows.evaluate import evaluate as evaluate_workflow
from ridgeline.workflows.optimize.server_driver import RestartableServer


@pytest.mark.slow
def test_quantised_model_is_smaller_and_answers(tmp_path: Path) -> None:
    events: list[ProgressEvent] = []
    result = ridgeline.quantize("demo", tmp_path / "int8", bits=8, observer=events.append)
    assert events and result.written_bytes > 0 and Path(result.path).is_dir()
    answer = ridgeline.generate(result.path, "import os", max_tokens=4)
    assert answer.completions[0].usage.completion_tokens == 4
    saved = json.loads(result.save(tmp_path / "result.json").read_text())
    assert saved == result.to_dict()
    with pytest.raises(BadInput):
        ridgeline.quantize("demo", tmp_path / "int8", bits=4)


class Called(Exception):
    pass


def test_evaluation_compares_the_candidate_with_its_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[Any, ...]] = []

    def evaluate(original: Settings, candidate: Settings, size: Any, **options: Any) -> None:
        calls.append((original, candidate, size.budget_s, options))
        raise Called

    monkeypatch.setattr(evaluate_workflow, "evaluate", evaluate)
    with pytest.raises(Called):
        ridgeline.evaluate("demo", "demo", budget="90s", quantization="int8", lm_eval="arc_easy")
    [(original, candidate, budget_s, options)] = calls
    assert original == Settings(model="demo") and candidate.quantization == "int8"
    assert budget_s == 90.0 and options["lm_eval"].tasks == "arc_easy"


def test_optimize_passes_its_options_to_the_search(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[Any, ...]] = []

    def optimize(settings: Settings, request: OptimizeOptions, **options: Any) -> None:
        calls.append((settings, request, options))
        raise Called

    monkeypatch.setattr(improve.optimize_workflow, "optimize", optimize)
    with pytest.raises(Called):
        ridgeline.optimize(
            "demo",
            budget="5m",
            objective="latency",
            output=tmp_path / "out",
            url="http://127.0.0.1:{port}",
            restart_cmd="vllm serve demo --port {port} {flags}",
            start_timeout="20m",
            seed=7,
        )
    [(settings, request, options)] = calls
    assert settings.seed == 7 and request.objective == "latency"
    assert request.budget == 300.0 and options["logs"] == tmp_path / "out"
    assert options["server"] == RestartableServer(
        url="http://127.0.0.1:{port}",
        restart_cmd="vllm serve demo --port {port} {flags}",
        start_timeout_s=1200.0,
    )
    assert options["observer"] is silent
