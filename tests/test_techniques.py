"""ridgeline/techniques.toml says what is true: rows lead somewhere, and nothing real is missing."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from ridgeline.compress.recipe import METHODS
from ridgeline.engine.scheduler.batching import POLICIES
from ridgeline.modelspec.rewrite import QUANTIZATIONS
from ridgeline.optimize.ladder import load_default_ladder

ROOT = Path(__file__).resolve().parent.parent
ROWS = tomllib.loads((ROOT / "ridgeline" / "techniques.toml").read_text(encoding="utf-8"))[
    "technique"
]
FIELDS = {
    "id", "title", "paper", "module", "switch", "honesty", "term", "conformance", "benchmark",
    "measured", "hurts_when",
}  # fmt: skip
MAY_BE_EMPTY = {"paper", "measured"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_a_row_leads_somewhere(row: dict[str, str]) -> None:
    optional = {"page", "no_rung", "gpu", "modelled", "not_modelled", "moves"}
    assert set(row) - optional == FIELDS
    assert all(row[name] for name in FIELDS - MAY_BE_EMPTY)
    assert (ROOT / row["module"]).is_file()
    assert (ROOT / row["conformance"]).is_file()
    assert row["benchmark"].startswith("ridgeline ") or (ROOT / row["benchmark"]).is_file()
    assert row["honesty"] in ("exact", "distribution-preserving", "lossy")


NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-\d)?")


@pytest.mark.parametrize("row", [row for row in ROWS if "page" in row], ids=lambda row: row["id"])
def test_a_page_says_what_its_row_says(row: dict[str, str]) -> None:
    """The row is the page in short: its papers, its command, its numbers."""
    page = " ".join((ROOT / row["page"]).read_text(encoding="utf-8").split())
    missing = [paper for paper in re.findall(r"\d{4}\.\d{5}", row["paper"]) if paper not in page]
    missing += [flag for flag in re.findall(r"--[a-z-]+", row["switch"]) if flag not in page]
    missing += [n for n in NUMBER.findall(row["measured"]) if n not in page]
    assert not missing, (row["page"], missing)


def test_every_method_has_a_page() -> None:
    pages = {Path(row["page"]).stem for row in ROWS if "/quantise/" in row.get("page", "")}
    folder = {path.stem for path in (ROOT / "docs" / "guides" / "quantise").glob("*.md")}
    others = {"rotation", "mixed", "nf4", "fp8", "tables", "kv-cache", "activations"}
    assert {*METHODS, *others} == pages
    assert folder == pages | {"formats", "index", "checkpoints"}


def test_a_lossy_technique_carries_its_measured_delta() -> None:
    assert all(row["measured"] for row in ROWS if row["honesty"] == "lossy")


REAL = re.compile(r"smollm2|gemma|llama-|llama 3|1b shape|1\.04 b|qwen|deepseek", re.IGNORECASE)
WITHOUT_REAL_FIGURES = {
    "async-scheduling": "for GPUs; its gain was never timed on one",
    "background-lane": "latencies, for an idle machine: bench_lanes.py --model smollm2",
    "draft-trees": "no Medusa heads of a real model are at hand",
    "expert-parallelism": "no mixture of experts is small enough for real weights",
    "flashinfer-attention": "for GPUs; never ran on one",
    "flex-attention": "for GPUs; never ran on one",
    "integer-tensor-parallelism": "latencies, for an idle machine: bench_parallel.py",
    "nccl-collectives": "needs several GPUs",
    "piecewise-graphs": "for GPUs; its gain was never timed on one",
    "qat": "trains the whole model: hours for SmolLM2 on two cores",
    "sequence-parallelism": "latencies, for an idle machine: bench_parallel.py",
    "slo-admission": "goodput, for an idle machine: bench_throttle.py --model smollm2",
    "sparse-24": "for GPUs; never ran on one",
    "thread-plan": "times, for an idle machine: bench_switches.py --only engine",
}


def has_real_figures(measured: str) -> bool:
    """Whether a figure is there and, if the demo model is named, also one of real weights or of a
    published shape."""
    return bool(measured) and ("demo" not in measured.lower() or bool(REAL.search(measured)))


def test_rows_without_real_figures_are_listed_with_the_reason() -> None:
    """Whoever takes the figure deletes the entry; a new row has a figure or a reason."""
    missing = {row["id"] for row in ROWS if not has_real_figures(row["measured"])}
    assert missing == WITHOUT_REAL_FIGURES.keys()


def test_figures_of_the_demo_model_alone_do_not_count() -> None:
    assert not has_real_figures("")
    assert not has_real_figures("Demo model: 1.4 times")
    assert has_real_figures("demo model: 1.4 times; SmolLM2: 1.2 times")


def test_what_ran_on_a_gpu_names_the_card_and_the_day() -> None:
    for row in ROWS:
        if "gpu" in row:
            assert re.match(r"one NVIDIA \w+, \d{4}-\d\d-\d\d: .", row["gpu"]), row["id"]


def test_generated_page_says_which_techniques_never_ran_on_a_gpu() -> None:
    page = (ROOT / "docs" / "reference" / "techniques.md").read_text(encoding="utf-8")
    never = sum("gpu" not in row for row in ROWS)
    assert page.count("- **On a GPU**: never run on one") == never
    assert 0 < never < len(ROWS)


def test_ids_are_unique() -> None:
    ids = [row["id"] for row in ROWS]
    assert len(ids) == len(set(ids))


def test_every_rung_of_the_ladder_has_a_row() -> None:
    known = {row["id"]: row for row in ROWS}
    for rung in load_default_ladder().rungs:
        assert rung.technique in known, rung.id
        assert known[rung.technique]["honesty"] == rung.honesty, rung.id


def test_a_technique_has_a_rung_or_a_reason_for_having_none() -> None:
    rungs = load_default_ladder().rungs
    tried = {rung.technique for rung in rungs}
    tried |= {variant["make"] for rung in rungs for variant in rung.variants if "make" in variant}
    both = [row["id"] for row in ROWS if row["id"] in tried and "no_rung" in row]
    neither = [row["id"] for row in ROWS if row["id"] not in tried and not row.get("no_rung")]
    assert not both and not neither, (both, neither)


def test_rungs_that_a_row_names_exist() -> None:
    rungs = {rung.id for rung in load_default_ladder().rungs}
    named = re.compile(r"the rung ([a-z0-9-]+)|the rungs ([a-z0-9-]+) and ([a-z0-9-]+)")
    texts = [row["hurts_when"] + " " + row.get("no_rung", "") for row in ROWS]
    found = {name for text in texts for match in named.findall(text) for name in match if name}
    assert "kv-int4" in found
    assert found <= rungs


def test_every_policy_and_quantisation_has_a_row() -> None:
    switches = " ".join(row["switch"] for row in ROWS)
    for name in POLICIES:
        assert f"--batching {name}" in switches
    for name in QUANTIZATIONS:
        assert f"--quantization {name}" in switches
