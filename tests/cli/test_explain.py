"""`ridgeline explain`: a model's settings, decisions and techniques; and every subject's page."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import pytest

import ridgeline
from ridgeline.cli.main import main
from ridgeline.config.load import METRICS
from ridgeline.config.settings import Settings
from ridgeline.config.tools import ExplainOptions
from ridgeline.diagnose import nsight
from ridgeline.diagnose.conditions import parse
from ridgeline.diagnose.losses.latency_losses import LOSSES
from ridgeline.diagnose.rules import rulebook
from ridgeline.diagnose.rules.decisions import shipped_decisions, walk
from ridgeline.diagnose.rules.rulebook import shipped_rules
from ridgeline.hardware.probe import probe
from ridgeline.measure.workload import LoadRequest
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import cost_model
from ridgeline.optimize import result
from ridgeline.optimize.quality import GateVerdict
from ridgeline.plan.step_time import replica
from ridgeline.records import Slo
from ridgeline.roofline import Peaks
from ridgeline.workflows.explain import topics
from ridgeline.workflows.explain.explain import (
    ExplainLoad,
    explain_topic,
    facts_of,
    is_model,
    topic_context,
)
from ridgeline.workflows.explain.explain_subject import _join_words
from ridgeline.workflows.explain.static_facts import PhaseBounds, static_facts
from ridgeline.workflows.explain.topics import method_rows, metric, technique, word
from ridgeline.workflows.explain.topics.cost_terms import TERMS

LONG_PROMPTS = "synthetic:input=4096,output=128"
SUBJECTS = [
    (kind, id)
    for kind in topics.REGISTRY
    for id in sorted(set(topics.topic_kind(kind).names().values()))
]


@pytest.fixture(scope="module")
def context() -> topics.TopicContext:
    return topic_context(Settings(model="demo"), ExplainLoad(request_rate=5.0))


def explain_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, object]:
    assert main(["explain", *args, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def answers(found: Mapping[str, object]) -> dict[str, bool | None]:
    rows = found["decisions"]
    assert isinstance(rows, list)
    return {row["id"]: row["answer"] for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "id"), SUBJECTS)
def test_every_subject_has_a_page_without_gaps(
    kind: str, id: str, context: topics.TopicContext
) -> None:
    page = topics.topic_page(kind, id, context)
    assert page.lines and page.id == id and page.kind == kind
    for label, text in page.lines:
        assert label and "unknown" not in text, (label, text)
        assert not re.search(r"\{\w+\}", text), text


@pytest.mark.parametrize(("kind", "id"), SUBJECTS)
def test_every_subject_is_found_by_its_id(kind: str, id: str) -> None:
    if kind == "method" and "technique" in dict(topics.find_topics(id)):
        return  # the row of Ridgeline's technique is shown in its place
    assert (kind, id) in topics.find_topics(id.replace("_", "-").upper())


DIAGNOSES = {
    *get_args(rulebook.Verdict),
    *(f"{bound}-bound" for bound in get_args(rulebook.Bound)),
    *(f"{bound}-bound" for bound in get_args(nsight.Bound) if bound != "latency"),
    *(f"{bound}-bound" for bound in get_args(replica.Bound)),
    *get_args(replica.Bound),
    *get_args(result.Verdict),
    *get_args(result.Ended),
    *get_args(GateVerdict),
    *LOSSES,
}


@pytest.mark.parametrize("subject", sorted(DIAGNOSES))
def test_words_of_the_diagnoses_can_be_looked_up(subject: str) -> None:
    """Taken from the types that hold them; the latency of a kernel is printed in a sentence."""
    assert {kind for kind, _ in topics.find_topics(subject)} & {"verdict", "word", "technique"}


def test_words_ending_in_bound_in_the_source_can_be_looked_up() -> None:
    package = Path(ridgeline.__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in package.rglob("*.py")]
    found = {name for text in texts for name in re.findall(r"\b[a-z]+(?:-[a-z]+)*-bound\b", text)}
    assert "decode-bandwidth-bound" in found
    assert [name for name in sorted(found) if not topics.find_topics(name)] == []


PRINTED = [
    *("not bound at this load", "Inconclusive", "kept", "reverted", "not exact", "unchanged"),
    *("high TTFT", "slow RAG", "high bill", "does not fit", "uneven streaming"),
    *("medusa", "FlashAttention", "pagedattention", "torch.compile", "disaggregation"),
    *("tensor parallelism", "pruning", "distillation", "slot", "slots", "goodput"),
    *METRICS,
    *("age of the queue", "tokens in time", "tokens/s/user", "output tok/s", "input tok/s"),
    *("steady", "normalised", "requests/s", "offered", "completed/min", "goodput req/s"),
    *("attainment", "batch fill", "KV occupancy", "cache hits", "preemptions", "wasted slots"),
    *("wasted steps", "engine busy", "planning", "MFU", "MBU", "CPU steal/wait", "CPU energy"),
    *("invalid", "baseline", "final", "Predicted", "Ratio [95% CI]", "The settings as shipped"),
    *("exact", "lossy", "near tie", "closed", "poisson", "probe", "break-even", "drift"),
]


FIELD = [
    *("h2o", "snapkv", "streamingllm", "pyramidkv", "kivi", "medusa", "eagle", "eagle-3", "mtp"),
    *("awq", "gptq", "smoothquant", "quarot", "spinquant", "hqq", "nf4", "bitnet"),
    *("flash attention", "flash decoding", "pagedattention", "radix attention"),
    *("chunked prefill", "sarathi", "splitwise", "distserve", "mooncake", "lmcache"),
    *("cascade attention", "ring attention", "ulysses", "zero", "megatron", "moe offload"),
    *("expert parallel", "deepep", "wide ep", "dbo", "cuda graphs", "torch.compile", "triton"),
    *("tensorrt", "speculative decoding", "lookahead", "prompt lookup", "suffix decoding"),
    *("layerskip", "early exit", "mixture of depths", "minference", "quest", "sparse attention"),
    *("nsa", "dsa", "mamba", "linear attention", "mla", "gqa", "mqa", "cross-layer attention"),
    *("yoco", "prefix caching", "semantic cache", "rag reduction", "llmlingua", "wanda"),
    *("sparsegpt", "2:4", "shortgpt", "minitron", "distillation", "lora", "multi-lora"),
    *("s-lora", "punica", "continuous batching", "dynamic batching", "orca", "disaggregation"),
    *("kv offload", "numa", "hugepages", "fp8", "mxfp4", "nvfp4", "int4", "qat", "eagle3"),
    *("kv quantisation", "w4a16", "weight-only quantization", "NUMA", "AirLLM", "KTransformers"),
    *("FlexGen", "TP", "all-reduce", "prompt compression", "YaRN", "guided decoding"),
    *("expert offload", "S4", "RWKV", "QuIP#", "AQLM", "Sequoia", "Hydragen"),
    *("two-batch overlap", "Llumnix", "RouteLLM", "beam search", "HiCache"),
]


@pytest.mark.parametrize("subject", FIELD)
def test_techniques_of_the_field_are_known_by_name(subject: str) -> None:
    """Whether Ridgeline has them or not; as people write them."""
    assert {kind for kind, _ in topics.find_topics(subject)} & {"technique", "method"}


def test_rows_of_the_field_name_terms_and_techniques_that_exist() -> None:
    rows = method_rows.rows().values()
    spelt = [topics.normalise(name) for row in rows for name in (row.id, *row.also)]
    names = [name.replace(" ", "") for name in spelt]
    assert sorted(set(names)) == sorted(names), "no name stands for two"
    for row in rows:
        assert row.moves in TERMS and row.does and row.others and row.hurts_when, row.id
        assert {*row.ours, *row.near} <= set(technique.rows()), row.id
        assert row.keeps is None or 0 < row.keeps < 1, row.id
        assert bool(row.keeps) == bool(row.left), f"{row.id}: a share needs its source"


def test_a_method_is_judged_by_the_model_and_machine(capsys: pytest.CaptureFixture[str]) -> None:
    h100 = ("--accelerator", "h100-sxm")
    assert main(["explain", "kivi", "llama-3.1-8b", *h100, "--workload", LONG_PROMPTS]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("KIVI (method), for dummy:llama-3.1-8b on h100-sxm")
    assert re.search(r"keys and values are \d+% of its bytes: with 19% of them left at most", out)
    assert "--kv-cache-dtype" in out and "ships with Ridgeline" not in out
    assert main(["explain", "moe offload", "llama-3.1-8b", *h100]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "no routed experts" in out and "not a technique of its engine" in out


@pytest.mark.parametrize(
    ("keeps", "reads", "expected"),
    [
        (0.5, True, "at most 1.67 times as fast"),
        (0.99, True, "next to nothing to gain"),
        (0.5, False, "arithmetic bounds it"),
    ],
)
def test_gain_of_fewer_bytes_is_that_of_their_share(
    keeps: float, reads: bool, expected: str
) -> None:
    facts = {"full_kv_share": 0.8, "running_seqs": 8, "full_step_s": 0.01, "full_step_reads": reads}
    assert expected in TERMS["kv"].judge(facts, keeps)


def test_without_a_model_it_says_which_one_and_how_to_name_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for subject, is_said in ((["slots"], True), (["slots", "demo"], False)):
        assert main(["explain", *subject]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert ("figures are about demo" in out and "add MODEL" in out) is is_said


@pytest.mark.parametrize("subject", PRINTED)
def test_printed_words_and_symptoms_can_be_looked_up(subject: str) -> None:
    assert topics.find_topics(subject)


@pytest.mark.parametrize(
    ("args", "subject", "model"),
    [
        ("does not fit", "does not fit", None),
        ("Does Not Fit dummy:llama-3.1-8b", "Does Not Fit", "dummy:llama-3.1-8b"),
        ("uneven streaming", "uneven streaming", None),
        ("uneven streaming demo", "uneven streaming", "demo"),
        ("slots demo", "slots", "demo"),
        ("speculation demo", "speculation", "demo"),
        ("demo slots", "demo", "slots"),
        ("no such", "no such", None),
    ],
)
def test_topics_of_several_words_need_no_quotes(args: str, subject: str, model: str | None) -> None:
    first, _, rest = args.partition(" ")
    joined = _join_words(ExplainOptions(subject=first, model=rest))
    assert (joined.subject, joined.model) == (subject, model)


def test_words_of_the_command_line_are_one_topic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "does", "not", "fit", "dummy:llama-3.1-8b"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("does not fit (word), for dummy:llama-3.1-8b on this machine")


def test_unknown_words_are_all_named(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("no such", "no such thing"):
        assert main(["explain", *words.split()]) == 2
        assert f"got '{words}'" in capsys.readouterr().err


def test_symptoms_name_rules_of_the_rule_book() -> None:
    known = {rule.id for rule in shipped_rules()}
    symptoms = [row for row in word.rows().values() if row.rules]
    assert len(symptoms) >= 8
    assert all(set(row.rules) <= known for row in symptoms)


def test_facts_answer_every_question(context: topics.TopicContext) -> None:
    assert all(answer.answer is not None for answer in walk(context.facts))
    for row in shipped_decisions():
        for condition in map(parse, row.when):
            assert condition.name in context.facts, condition.text
            assert condition.other is None or condition.other in context.facts, condition.text


def test_metrics_name_existing_metrics() -> None:
    docs = Path(ridgeline.__file__).parent.parent / "docs"
    defined = (docs / "concepts" / "measurements.md").read_text(encoding="utf-8")
    words = topics.normalise(defined.replace("*", " "))
    for row in metric.rows().values():
        assert set(row.losses) <= set(LOSSES), row.id
        assert set(row.helps) <= set(technique.rows()), row.id
        assert topics.normalise(row.id) in words or topics.normalise(row.title) in words, row.id


@pytest.mark.slow
def test_slo_below_the_bound_is_impossible(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = answers(explain_json(capsys, "demo"))
    assert kept["one-answer"] is True and kept["load"] is None
    broken = answers(explain_json(capsys, "demo", "--slo", "ttft:0.001 tpot:0.0001"))
    assert broken["one-answer"] is False and broken["one-prompt"] is False
    assert "room" not in broken and "slots" not in broken, "no batch helps one answer"


@pytest.mark.slow
def test_load_and_slots_are_judged(capsys: pytest.CaptureFixture[str]) -> None:
    busy = explain_json(capsys, "demo", "--request-rate", "1e6", "--max-num-seqs", "1")
    assert answers(busy)["load"] is False
    facts = busy["facts"]
    assert isinstance(facts, dict)
    assert facts["replicas_needed"] == pytest.approx(1e6 / facts["carried_req_s"], rel=0.01)
    assert answers(busy)["slots"] is False


@pytest.mark.slow
def test_a_small_kv_cache_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    small = explain_json(capsys, "demo", "--kv-cache-memory-bytes", "16MiB")
    assert answers(small)["kv-room"] is False
    assert answers(explain_json(capsys, "demo"))["kv-room"] is True


def test_model_without_a_tokenizer_gets_random_prompts() -> None:
    name, facts = facts_of(Settings(model="dummy:llama-1b-32k", max_model_len=4096), ExplainLoad())
    assert name.startswith("synthetic")
    assert facts["mean_prompt_tokens"] == 512 and facts["mean_output_tokens"] == 128


def test_bounds_are_the_slower_of_bytes_and_arithmetic() -> None:
    model = cost_model(load_spec("demo"))
    slow = Peaks(bytes_s=1.0, flops_s=1e30)
    read = PhaseBounds(model, slow)
    one = read.decode(1, 100)
    assert one == pytest.approx(model.step([(1, 100)], 1).bytes)
    assert read.rows(1, 8, 100) < 1.1 * one, "rows share the weights"
    busy = Peaks(bytes_s=1e30, flops_s=1.0)
    assert PhaseBounds(model, busy).rows(1, 8, 100) > 7.9 * PhaseBounds(model, busy).decode(1, 100)


def test_shared_heads_shorten_a_prompt() -> None:
    same = tuple(range(256))
    sample = [LoadRequest(id=str(i), kind="same", prompt=same, max_tokens=16) for i in range(8)]
    facts = static_facts(probe(), Settings(model="demo"), sample, Slo.parse("ttft:500 tpot:50"))
    assert facts["mean_prompt_tokens"] == 256
    assert float(str(facts["cached_prompt_s"])) < 0.5 * float(str(facts["prompt_s"]))


def test_an_unknown_subject_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "prefix-cachng"]) == 2
    assert "did you mean prefix-caching" in capsys.readouterr().err
    assert main(["explain", "no/such/model"]) == 2
    assert "model directory" in capsys.readouterr().err


def test_topics_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = explain_json(capsys, "topics")
    assert set(listed) == set(topics.REGISTRY)


def test_a_rate_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "demo", "--request-rate", "0"]) == 2
    assert "--request-rate" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("max-num-seqs",),
        ("--max-num-seqs",),
        ("--max_num_seqs",),
        ("--max-num-seqs", "demo"),
        ("--enable-prefix-caching",),
        ("--no-enable-prefix-caching",),
        ("--api-key",),
    ],
)
def test_a_flag_is_explained_with_its_dashes_or_without(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    name = topics.normalise(words[0].removeprefix("--no")).replace(" ", "_")
    assert main(["explain", *words, "--json"]) == 0
    assert [page["id"] for page in json.loads(capsys.readouterr().out)] == [name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [("--max-num-seqs", "8"), ("--max-num-seqs=8",), ("demo", "--max-num-seqs", "8")],
)
def test_a_flag_with_a_value_sets_it(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    settings = explain_json(capsys, *words)["settings"]
    assert isinstance(settings, dict) and settings["max_num_seqs"] == 8


def test_unknown_flag_is_rejected_with_suggestions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", "--max-num-seq"]) == 2
    assert "max_num_seqs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("subject", "expected"),
    [("demo", True), ("smollm2", True), ("dummy:x", True), ("a/b", True), ("lora", False)],
)
def test_a_subject_is_a_model_where_its_name_stands_for_one(subject: str, expected: bool) -> None:
    assert is_model(subject) is expected


def test_symptom_of_two_words_needs_no_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", "slow", "rag"])
    unquoted = capsys.readouterr().out
    main(["explain", "slow rag"])
    assert unquoted == capsys.readouterr().out and unquoted.startswith("slow rag")


@pytest.mark.parametrize(
    ("technique", "figure"),
    [
        ("response-cache", r"stored answer about [\d.]+ ms"),
        ("semantic-cache", r"From [\d.]+% of the requests on"),
        ("selective-caching", r"tokens takes [\d.]+% of the cache"),
        ("background-lane", r"occupies at least [\d.]+ of 64 slots, and takes at least \d+% of"),
    ],
)
def test_caches_and_the_background_lane_are_judged(technique: str, figure: str) -> None:
    page = explain_topic(technique, Settings(model="demo"), ExplainLoad(request_rate=20.0)).pages[0]
    lines = [text for label, text in page.lines if label in ("here", "yes", "no")]
    assert len(lines) == 2 and re.search(figure, " ".join(lines))
