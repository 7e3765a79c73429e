"""`explain` of tiers, replicas and disaggregation: arithmetic with facts of model and machine."""

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
    "prompt_step_s": 0.1,
    "running_seqs": 8,
    "prompt_step_tokens": 512,
    "slo_tpot_s": 0.05,
    "model_weights_bytes": 900_000_000,
    "machine_memory_gb": 8.0,
    "carried_req_s": 2.0,
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
    assert "20 ms, and 120 ms with 512 prompt tokens" in text
    assert "20 ms in shared memory and 8 ms over 10 Gbit/s" in text and "yes:" in text
    assert "no:" in figures("disaggregation", slo_tpot_s=1.0)
    assert "no:" in figures("disaggregation", slo_tpot_s=0.01)
    without = {name: value for name, value in FACTS.items() if name != "slo_tpot_s"}
    assert fleet_figures("disaggregation", without)[-1][0] == "no"


def test_replicas_follow_the_rate_and_the_memory() -> None:
    assert "8 fit in this machine's memory" in figures("replicas")
    assert "--request-rate" in figures("replicas")
    assert "yes: does 5 requests/s" in figures(
        "replicas", request_rate_req_s=5.0, replicas_needed=3
    )
    assert "no:" in figures("replicas", request_rate_req_s=1.0, replicas_needed=1)


def test_every_technique_with_figures_is_in_the_table() -> None:
    assert set(rows()) >= FLEET_TECHNIQUES
