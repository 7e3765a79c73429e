"""`explain` of tiers, caches, replicas and disaggregation: arithmetic with facts."""

from __future__ import annotations

from ridgeline.diagnose.conditions import Value
from ridgeline.workflows.explain.fleet_figures import FLEET_TECHNIQUES, fleet_figures
from ridgeline.workflows.explain.topics.technique import rows

FACTS: dict[str, Value] = {
    "mean_prompt_tokens": 1000,
    "prompt_s": 1.0,
    "model_kv_bytes_per_token": 10_000,
    "kv_cache_bytes": 100_000_000,
    "memory_bandwidth_bytes_s": 1e9,
    "shared_prompt_share": 0.5,
    "full_step_s": 0.02,
    "mixed_step_s": 0.11,
    "running_seqs": 8,
    "prompt_step_tokens": 512,
    "slo_tpot_s": 0.05,
    "model_weights_bytes": 900_000_000,
    "machine_memory_gb": 8.0,
    "carried_req_s": 2.0,
    "question_s": 0.05,
    "mean_output_tokens": 100,
    "alone_token_s": 0.01,
    "cached_prompt_s": 0.5,
    "max_num_seqs": 8,
}


def figures(technique: str, **changed: Value) -> str:
    return " | ".join(": ".join(line) for line in fleet_figures(technique, {**FACTS, **changed}))


def test_tiers_compare_copying_a_prompt_with_computing_it() -> None:
    text = figures("kv-tiers")
    assert "1 s to compute and 20 ms to copy" in text and "50 times" in text
    assert "above 10 MB/s" in text and "holds 10,000 tokens" in text and "yes:" in text
    assert "no:" in figures("kv-tiers", shared_prompt_share=0.0)
    assert "no:" in figures("kv-tiers", prompt_s=0.001)


def test_disaggregation_pays_only_where_prompts_break_the_slo() -> None:
    text = figures("disaggregation")
    assert "20 ms, and 110 ms with 512 prompt tokens" in text
    assert "20 ms in shared memory and 8 ms over 10 Gbit/s" in text and "yes:" in text
    assert "no:" in figures("disaggregation", slo_tpot_s=1.0)
    assert "no:" in figures("disaggregation", slo_tpot_s=0.01)
    assert "no:" in figures("disaggregation", slo_tpot_s=0.115)
    without = {name: value for name, value in FACTS.items() if name != "slo_tpot_s"}
    assert fleet_figures("disaggregation", without)[-1][0] == "no"


def test_replicas_follow_the_rate_and_the_memory() -> None:
    assert "8 fit in this machine's memory" in figures("replicas")
    assert "--request-rate" in figures("replicas")
    assert "yes: does 5 requests/s" in figures(
        "replicas", request_rate_req_s=5.0, replicas_needed=3
    )
    assert "no:" in figures("replicas", request_rate_req_s=1.0, replicas_needed=1)


def test_a_semantic_cache_pays_from_the_share_of_a_request_that_an_embedding_takes() -> None:
    text = figures("semantic-cache")
    assert "50 ms of the machine's time; a hit saves the 500 ms" in text
    assert "yes: " in text and "From 10.0% of the requests on" in text
    assert "no: " in figures("semantic-cache", carried_req_s=30.0)


def test_a_stored_answer_takes_memory_for_its_entry_too() -> None:
    assert f"{(600 + 132 * 100) / 1024:.1f} KiB" in figures("response-cache")


def test_the_background_needs_slots_and_time() -> None:
    text = figures("background-lane", request_rate_req_s=1.0)
    assert "yes: " in text and "at least 1.5 of 8 slots, and takes at least 50% of the" in text
    assert "no: " in figures("background-lane", request_rate_req_s=1.9), "prompts fill the time"
    assert "no: " in figures("background-lane", request_rate_req_s=1.0, max_num_seqs=1)
    assert "--request-rate" in figures("background-lane")


def test_every_technique_with_figures_is_in_the_table() -> None:
    assert set(rows()) >= FLEET_TECHNIQUES
