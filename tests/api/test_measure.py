"""`bench`, `diagnose` and `explain` on the demo model: figures, observers, records."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

import ridgeline
from ridgeline.records.progress import ProgressEvent
from ridgeline.workflows.bench.bench import BenchResult

ENGINE = {"kv_cache_memory_bytes": 32 << 20, "num_threads": 1}
LOAD = {"input_len": 16, "output_len": 4, "num_prompts": 6, "num_warmups": 0}


@pytest.fixture(scope="module")
def run() -> BenchResult:
    return ridgeline.bench("demo", slo="ttft:60000", **LOAD, **ENGINE)  # type: ignore[arg-type]


def test_bench_measures_the_engine_here(run: BenchResult, tmp_path: Path) -> None:
    assert run.in_process and run.summary.num_ok == 6
    assert run.summary.goodput is not None and run.summary.output_tokens == 24
    saved = json.loads(run.save(tmp_path / "run.json").read_text())
    assert saved["completed"] == 6 and saved["total_output_tokens"] == 24
    assert saved == json.loads(json.dumps(run.to_dict()))
    assert "<script" not in run.save(tmp_path / "run.html").read_text()


def test_progress_reaches_the_observer_and_stdout_stays_empty(
    capfd: pytest.CaptureFixture[str],
) -> None:
    events: list[ProgressEvent] = []
    ridgeline.bench("demo", observer=events.append, **LOAD, **ENGINE)  # type: ignore[arg-type]
    assert len(events) > 2 and all(str(event) for event in events)
    assert capfd.readouterr().out == ""


async def test_bench_runs_where_an_event_loop_already_runs() -> None:
    assert asyncio.get_running_loop()
    result = ridgeline.bench("demo", **LOAD, **ENGINE)  # type: ignore[arg-type]
    assert result.summary.num_ok == 6


def test_diagnosis_of_a_recorded_run_is_that_of_the_run(run: BenchResult, tmp_path: Path) -> None:
    diagnosis = ridgeline.diagnose(run=run.save_log(tmp_path / "run.jsonl"))
    assert diagnosis.losses is not None and diagnosis.losses.num_requests == 6
    saved = json.loads(diagnosis.save(tmp_path / "diagnosis.json").read_text())
    assert saved == json.loads(json.dumps(diagnosis.to_dict()))
    assert "<script" not in diagnosis.save(tmp_path / "diagnosis.html").read_text()


def test_diagnosis_measures_the_engine_here() -> None:
    diagnosis = ridgeline.diagnose("demo", **LOAD, **ENGINE)  # type: ignore[arg-type]
    assert diagnosis.losses is not None and diagnosis.losses.total_s > 0


@pytest.mark.slow
def test_explanations_of_models_and_topics(tmp_path: Path) -> None:
    model = ridgeline.explain("demo", max_num_seqs=3)
    assert model.model is not None and model.topic is None
    assert model.model.settings["max_num_seqs"] == 3 and model.model.techniques
    topic = ridgeline.explain("ttft", "demo")
    assert topic.topic is not None and topic.topic.model == "demo"
    assert topic.topic.pages[0].kind == "metric"
    names = ridgeline.explain("topics")
    assert names.model is None and "ttft" in names.topics["metric"]
    for explanation in (model, topic, names):
        saved = json.loads(explanation.save(tmp_path / "explanation.json").read_text())
        assert saved == json.loads(json.dumps(explanation.to_dict()))
