"""`ridgeline eval --lm-eval`: both models are evaluated over HTTP on paired documents."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ridgeline.cli.render.evaluate import evaluation_text
from ridgeline.config.settings import Settings
from ridgeline.engine.engine import Engine
from ridgeline.errors import BadInput, CannotRun
from ridgeline.optimize.quality import QualityVerdict
from ridgeline.optimize.quality.thresholds import check_max
from ridgeline.stats import Interval
from ridgeline.workflows.evaluate.evaluation import Evaluation, with_lm_eval
from ridgeline.workflows.evaluate.lm_eval import (
    LmEvalOptions,
    compare_documents,
    find_program,
    read_samples,
    run_lm_eval,
    tokenizer_folder,
)

STAND_IN = """
import json, sys, urllib.request
from pathlib import Path

given = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=False))
arguments = dict(pair.split("=", 1) for pair in given["--model_args"].split(","))
if given["--tasks"] == "unknown":
    sys.exit("Tasks not found: unknown")
folder = Path(given["--output_path"]) / arguments["model"]
folder.mkdir()
with (folder / "samples_colours_2026-11-21T10-00-00.jsonl").open("w") as out:
    for doc_id, word in enumerate(("import", "return", "class")):
        body = {"model": arguments["model"], "prompt": f"{word} ", "max_tokens": 1, "logprobs": 1,
                "echo": True, "temperature": 0}
        asked = urllib.request.Request(arguments["base_url"], json.dumps(body).encode(),
                                       {"content-type": "application/json"})
        [choice] = json.load(urllib.request.urlopen(asked))["choices"]
        logprobs = choice["logprobs"]["token_logprobs"]
        sample = {"doc_id": doc_id, "filter": "none", "metrics": ["acc", "loss"],
                  "acc": float(logprobs[-1] < 0), "loss": -logprobs[-1]}
        out.write(json.dumps(sample) + chr(10))
"""


@pytest.fixture
def plain_panel() -> Evaluation:
    """A candidate that passes."""
    one = Interval(low=1.0, mid=1.0, high=1.0)
    found = QualityVerdict(
        verdict="pass",
        checks=(check_max("KL", one, 2.0),),
        perplexity_before=one,
        perplexity_after=one,
        num_positions=1,
        num_windows=1,
        num_flips=0,
        num_looks=1,
    )
    return Evaluation(
        original="a",
        candidate_name="b",
        floor=found,
        candidate=found,
        by_kind={},
        by_context={},
        lengths=None,
        control=found,
        refusal=None,
        verdict="pass",
    )


@pytest.fixture
def program(tmp_path: Path) -> str:
    """Stands in for lm-eval: asks the server, writes its files."""
    script = tmp_path / "lm-eval"
    script.write_text(f"#!{sys.executable}\n{STAND_IN}", encoding="utf-8")
    script.chmod(0o755)
    return str(script)


@pytest.mark.slow
def test_both_models_are_evaluated_on_paired_documents(program: str) -> None:
    harness = LmEvalOptions("colours", program=program)
    tokenizer = tokenizer_folder(["dummy:llama-1b-32k", "demo"])
    found = []
    for quantization in (None, "int4"):
        settings = Settings(model="demo", quantization=quantization, max_num_seqs=4)
        with Engine.from_settings(settings) as engine:
            found.append(run_lm_eval(harness, engine, tokenizer))
            if quantization is None:
                with pytest.raises(BadInput, match="Tasks not found: unknown"):
                    run_lm_eval(LmEvalOptions("unknown", program=program), engine, tokenizer)
    acc, loss = compare_documents(*found, 0.05)
    assert (acc.metric, acc.num_docs, acc.before, acc.after) == ("acc", 3, 1.0, 1.0)
    assert acc.check is not None and acc.check.verdict == "inconclusive"  # three documents
    assert loss.check is None and loss.num_changed == 3  # INT4's numbers are others


def _documents(values: list[float]) -> dict[tuple[str, str], dict[int, float]]:
    return {("t", "acc"): dict(enumerate(values)), ("t", "acc_norm"): dict(enumerate(values))}


@pytest.mark.parametrize(
    ("after", "verdict"),
    [([1.0] * 400, "pass"), ([1.0] * 300 + [0.0] * 100, "fail"), ([1.0] * 5, "inconclusive")],
)
def test_correct_answers_are_counted_once_per_task(after: list[float], verdict: str) -> None:
    first, second = compare_documents(_documents([1.0] * len(after)), _documents(after), 0.05)
    assert first.check is not None and first.check.verdict == verdict
    assert second.check is None


def test_worst_verdict_decides(plain_panel: Evaluation) -> None:
    scores = compare_documents(_documents([1.0] * 400), _documents([0.0] * 400), 0.05)
    panel = with_lm_eval(plain_panel, scores)
    assert (plain_panel.verdict, panel.verdict) == ("pass", "fail")
    assert "verdict: fail (t, acc)" in evaluation_text(
        panel
    ) and "lm-eval   t, acc: 1 → 0" in evaluation_text(panel)


def test_filters_are_separate_and_text_values_are_ignored(tmp_path: Path) -> None:
    rows = [
        {"doc_id": 0, "filter": kind, "metrics": ["hit", "said"], "hit": 1, "said": "x"}
        for kind in ("strict", "none")
    ]
    text = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "samples_my_task_2026.jsonl").write_text(text, encoding="utf-8")
    assert read_samples(tmp_path) == {
        ("my_task", "hit, strict"): {0: 1.0},
        ("my_task", "hit"): {0: 1.0},
    }
    with pytest.raises(BadInput, match="no number"):
        compare_documents(read_samples(tmp_path), {}, 0.05)


def test_missing_requirements_are_found_before_any_work() -> None:
    with pytest.raises(CannotRun, match="--lm-eval-program"):
        find_program(LmEvalOptions("x", program="there-is-no-such-program"))
    with pytest.raises(CannotRun, match="tokenizer"):
        tokenizer_folder(["dummy:llama-1b-32k"])
