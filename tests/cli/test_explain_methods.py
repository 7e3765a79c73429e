"""Methods of the field: what each could gain, and the page on which it is shown."""

from __future__ import annotations

import re

import pytest

from ridgeline.config.settings import Settings
from ridgeline.diagnose.conditions import Value
from ridgeline.workflows.explain import topics
from ridgeline.workflows.explain.explain import ExplainLoad, explain_topic, topic_context
from ridgeline.workflows.explain.topics import technique
from ridgeline.workflows.explain.topics.cost_terms import TERMS
from ridgeline.workflows.explain.topics.method_rows import gain_here, rows

FACTS: dict[str, Value] = {
    "model_weights": "dense",
    "model_compute_dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16",
    "full_weights_share": 0.8,
    "full_kv_share": 0.2,
    "running_seqs": 8,
    "full_step_s": 0.01,
    "full_step_reads": True,
}


@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [
        ("dense", "bfloat16", "with 50% of them left at most 1.67 times"),
        ("bf16", "float32", "with 50% of them left at most 1.67 times"),
        ("dense", "float32", "with 25% of them left at most 2.5 times"),
        ("int4", "bfloat16", "80% of its bytes; they are stored as int4 already"),
        ("float8_e4m3", "bfloat16", "80% of its bytes; they are stored as float8_e4m3 already"),
    ],
)
def test_fewer_bits_are_a_gain_over_wide_weights_only(kind: str, dtype: str, expected: str) -> None:
    facts = {**FACTS, "model_weights": kind, "model_compute_dtype": dtype}
    assert gain_here(rows()["INT8"], facts).endswith(expected + " as fast" * ("with" in expected))


def test_fewer_bits_are_a_gain_over_a_wide_cache_only() -> None:
    kivi = rows()["KIVI"]
    assert "with 19% of them left" in gain_here(kivi, FACTS)
    for dtype in ("int8", "fp8", "int4"):
        text = gain_here(kivi, {**FACTS, "kv_cache_dtype": dtype})
        assert "left" not in text and f"stored as {dtype} already" in text
    assert "left" in gain_here(rows()["H2O"], {**FACTS, "kv_cache_dtype": "fp8"}), "fewer tokens"


def test_fewer_bits_are_marked() -> None:
    """They have a share that is left, of the terms that have a format."""
    narrow = {row.id for row in rows().values() if row.narrows}
    assert all(rows()[id].keeps and rows()[id].moves in ("weights", "kv") for id in narrow)
    tells = ("4-bit", "2-bit", "8-bit", "INT8", "2 bits", " 4 or 3 bits")
    meant = {
        row.id
        for row in rows().values()
        if row.keeps and any(word in row.does for word in tells) and row.moves in ("weights", "kv")
    }
    assert meant <= narrow


def test_shares_of_formats_are_their_bits() -> None:
    """`N bits, and a scale of S bits per group of G` of sixteen."""
    form = re.compile(r"(\d+) bits, and a scale( and a zero)? of (\d+) bits per \w+ of (\d+)")
    found = [(row, match) for row in rows().values() if (match := form.match(row.left))]
    assert len(found) > 10
    for row, match in found:
        numbers = 2 if match[2] else 1
        bits = int(match[1]) + numbers * int(match[3]) / int(match[4])
        assert row.keeps == pytest.approx(bits / 16, abs=0.006), row.id


@pytest.mark.slow
def test_no_gain_of_a_format_that_the_settings_have() -> None:
    settings = Settings(model="dummy:llama-1b-32k", quantization="int4", max_model_len=2048)
    for name in ("optq", "gptq", "int4"):
        page = explain_topic(name, settings, ExplainLoad()).pages[0]
        (here,) = (text for label, text in page.lines if label == "here")
        assert "stored as int4 already" in here and "left at most" not in here, name


def test_every_method_is_shown_under_each_of_its_names() -> None:
    for row in rows().values():
        for name in (row.id, *row.also):
            found = dict(topics.find_topics(name))
            if "technique" in found:
                assert technique.method_of(found["technique"]) == row, name
            else:
                assert found["method"] == row.id, name


@pytest.mark.slow
def test_a_technique_says_what_it_could_gain() -> None:
    context = topic_context(Settings(model="dummy:llama-1b-32k", max_model_len=2048), ExplainLoad())
    for id in ("smoothquant", "flex-attention", "gptq"):
        row = technique.method_of(id)
        assert row is not None
        lines = dict(technique.page(id, context).lines)
        assert lines["here"] == gain_here(row, context.facts)


def test_rows_that_differ_in_what_they_leave_give_a_technique_no_share() -> None:
    masked = technique.method_of("weight-masks")
    assert masked is not None and masked.id == "Wanda" and masked.keeps is None


def test_prompts_stall_a_step_by_what_they_add_to_it() -> None:
    facts: dict[str, Value] = {
        "full_step_s": 0.02, "mixed_step_s": 0.11, "prompt_step_tokens": 512, "slo_tpot_s": 0.105,
    }  # fmt: skip
    text = TERMS["stalls"].judge(facts, None)
    assert "20 ms, and one with 512 tokens of prompts in it 110 ms, which exceeds" in text


def test_a_mixed_step_reads_the_weights_once() -> None:
    settings = Settings(
        model="dummy:llama-3.1-8b", dtype="bfloat16", max_num_seqs=8, max_num_batched_tokens=64
    )
    facts = topic_context(settings, ExplainLoad(accelerator="h100-sxm")).facts
    step_s, chunk_s, mixed_s = (
        float(str(facts[name])) for name in ("full_step_s", "prompt_step_s", "mixed_step_s")
    )
    assert max(step_s, chunk_s) < mixed_s < 0.7 * (step_s + chunk_s)


@pytest.mark.parametrize(
    ("name", "id"),
    [
        ("powerinfer", "activation sparsity"),
        ("ragcache", "prefix caching"),
        ("moba", "NSA"),
        ("vattention", None),  # contiguous in virtual memory, without paging by the kernels
        ("pyramidinfer", None),
        ("gist tokens", None),
        ("multi-step scheduling", None),
    ],
)
def test_a_name_stands_for_what_its_paper_describes(name: str, id: str | None) -> None:
    assert list(dict(topics.find_topics(name)).values()) == ([id] if id else [])


def test_papers_belong_to_the_rows_that_they_describe() -> None:
    of = {
        "2401.00588": "fair scheduling",
        "2311.04934": "CacheBlend",
        "2312.12456": "activation sparsity",
    }
    for paper, id in of.items():
        assert [row.id for row in rows().values() if paper in row.paper] == [id]
    assert rows()["RAG reduction"].paper == ""


LOAD_DEPENDENT = (
    *("DSA", "NSA", "Quest", "sliding window attention", "sparse attention", "StreamingLLM"),
    *("Mamba", "linear attention", "YOCO", "early exit", "activation sparsity"),
)


@pytest.mark.parametrize("id", [*LOAD_DEPENDENT, "MLA", "GQA", "MQA", "pruning"])
def test_no_share_is_left_where_the_load_or_the_model_decides(id: str) -> None:
    assert rows()[id].keeps is None


def test_every_technique_has_a_figure_here() -> None:
    """Of a row of the field, of its own term, or of fleets; never two of them."""
    for id, row in technique.rows().items():
        method = technique.method_of(id)
        assert ("moves" in row) == (method is None), id
        assert row.get("moves", "kv") in TERMS, id


@pytest.mark.slow
def test_a_technique_without_a_row_of_the_field_prints_its_term() -> None:
    context = topic_context(Settings(model="dummy:llama-1b-32k", max_model_len=2048), ExplainLoad())
    for id in ("packed-checkpoint", "native-sampling", "stream-resume", "mixed-widths"):
        lines = dict(technique.page(id, context).lines)
        assert re.search(r"\d", lines["here"]), id
        assert lines["predicted by"].startswith("ridgeline ") or lines["not predicted"], id
