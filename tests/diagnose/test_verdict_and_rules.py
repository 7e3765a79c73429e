"""Every bound and every shipped rule speaks on evidence made for it, and is silent otherwise."""

from __future__ import annotations

import tomllib
from importlib.resources import files

import pytest

from ridgeline.diagnose import advise, facts_of, verdict
from ridgeline.diagnose.rules.rulebook import read_rules, shipped_rules
from ridgeline.records import RequestTrace, RunTrace, Slo

SHARES = {
    "bandwidth_share": 0.1,
    "compute_share": 0.1,
    "overhead_share": 0.1,
    "planning_share": 0.05,
    "idle_share": 0.1,
    "mbu_share": 0.2,
    "mfu_share": 0.3,
}


@pytest.mark.parametrize(
    ("bound", "facts"),
    [
        ("client", {"client_cpu_share": 0.95, "send_lag_p95_s": 0.2}),
        ("capacity", {"preemptions": 9, "num_requests": 100, "kv_used_share": 0.99}),
        ("capacity", {"kv_used_share": 0.99, "waiting_time_share": 0.5}),
        ("queue", {"waiting_time_share": 0.8, "queue_of_ttft_share": 0.9, "queue_p95_s": 1.0}),
        ("idle", {"idle_share": 0.9}),
        ("bandwidth", {"bandwidth_share": 0.6}),
        ("compute", {"compute_share": 0.6}),
        ("overhead", {"overhead_share": 0.6}),
        ("planning", {"planning_share": 0.6}),
    ],
)
def test_each_bound_follows_from_its_evidence(bound: str, facts: dict[str, float]) -> None:
    found = verdict({**SHARES, **facts})
    assert found.bound == bound
    assert set(found.evidence) & set(facts)
    assert "{" not in found.sentence


def test_without_steps_no_bound_is_claimed() -> None:
    assert verdict({"num_requests": 10}).bound == "unknown"


EVIDENCE: dict[str, dict[str, object]] = {
    "too-few-slots": {
        "queue_of_ttft_share": 0.8,
        "waiting_time_share": 0.7,
        "batch_fill_share": 1.0,
        "kv_used_share": 0.1,
        "doubled_batch_gain": 1.5,
    },
    "batch-formed-too-rarely": {
        "batching": "static",
        "max_num_seqs": 8,
        "batch_fill_share": 0.4,
        "waiting_time_share": 0.5,
    },
    "prompts-are-computed-slowly": {
        "ttft_p95_s": 1.0,
        "slo_ttft_s": 0.5,
        "queue_of_ttft_share": 0.1,
        "mean_prompt_tokens": 500,
    },
    "prefill-stalls-decode": {
        "itl_p99_s": 0.4,
        "itl_p50_s": 0.02,
        "mixed_step_share": 0.3,
        "mean_prompt_tokens": 500,
        "preemptions": 0,
    },
    "decode-reads-weights": {"bandwidth_share": 0.6, "tpot_p50_s": 0.06, "slo_tpot_s": 0.05},
    "few-sequences-per-weight-read": {
        "mfu_share": 0.1,
        "bandwidth_share": 0.5,
        "mean_waiting": 5.0,
        "mean_running": 2.0,
        "max_num_batched_tokens": 512,
    },
    "over-batched": {
        "tpot_p95_s": 0.09,
        "slo_tpot_s": 0.05,
        "mean_running": 40.0,
        "bandwidth_share": 0.1,
    },
    "preemption-storm": {"preemptions": 20, "num_requests": 100},
    "kv-cache-too-small": {
        "kv_used_share": 0.99,
        "batch_fill_share": 0.3,
        "waiting_time_share": 0.5,
    },
    "prompts-computed-again": {"shared_prompt_share": 0.6, "cached_prompt_share": 0.0},
    "steps-are-overhead": {"overhead_share": 0.9, "mean_running": 4.0},
    "client-sends-late": {"client_cpu_share": 0.95, "send_lag_p95_s": 0.2},
    "hardly-any-load": {"idle_share": 0.9},
}


def test_every_shipped_rule_has_evidence_here() -> None:
    assert {rule.id for rule in shipped_rules() if rule.figures} == set(EVIDENCE)


@pytest.mark.parametrize("rule", sorted(EVIDENCE))
def test_rule_applies_only_with_all_of_its_evidence(rule: str) -> None:
    facts = EVIDENCE[rule]
    assert rule in {advice.rule for advice in advise(facts)}
    for name in facts:
        rest = {key: value for key, value in facts.items() if key != name}
        assert rule not in {advice.rule for advice in advise(rest)}, name


def test_every_rung_that_a_rule_names_is_on_the_ladder() -> None:
    text = files("ridgeline.optimize").joinpath("ladder.toml").read_text(encoding="utf-8")
    rungs = {row["id"] for row in tomllib.loads(text)["rung"]}
    assert {rule.rung for rule in shipped_rules() if rule.rung} <= rungs


def test_an_unknown_key_of_a_rule_is_named() -> None:
    with pytest.raises(ValueError, match="symptoms"):
        read_rules('[[rule]]\nid = "x"\nsymptoms = ""\n')


def test_a_rule_that_is_observed_nowhere_is_refused() -> None:
    row = """[[rule]]
id = "x"
verdict = "queue-bound"
fix = "f"
trade_off = "t"
not_help = "n"
flag = {}
"""
    with pytest.raises(ValueError, match="observed nowhere"):
        read_rules(row)
    with pytest.raises(ValueError, match="no such loss"):
        read_rules(row + '[rule.losses]\nloss = "sleep"\nleast = 0.1\nsentence = ""\n')
    with pytest.raises(ValueError, match="either `when` or `share`"):
        read_rules(row + '[rule.headline]\nbound = "queue"\nsentence = ""\n')


def test_busy_machine_comes_before_every_other_bound() -> None:
    facts = {**SHARES, "idle_share": 0.9, "machine_taken_share": 0.4}
    assert verdict(facts).bound == "machine"
    assert verdict({**facts, "machine_taken_share": 0.05}).bound == "idle"


def test_facts_of_a_run_by_hand() -> None:
    """Two requests, one second apart; one answered, one failed."""
    common = {
        "kind": "chat",
        "prompt_tokens": 100,
        "requested_tokens": 3,
        "finish_reason": "length",
    }
    answered = RequestTrace(
        id="a",
        scheduled_s=0.0,
        sent_s=0.1,
        started_s=0.3,
        token_s=(0.5, 0.6, 0.7),
        token_counts=(1, 1, 1),
        finished_s=0.7,
        cached_tokens=25,
        output_tokens=3,
        **common,
    )
    failed = RequestTrace(
        id="b",
        scheduled_s=1.0,
        sent_s=1.0,
        started_s=None,
        token_s=(),
        token_counts=(),
        finished_s=None,
        cached_tokens=0,
        output_tokens=0,
        error="refused",
        **common,
    )
    run = RunTrace(
        target="t",
        workload="w",
        arrivals="burst",
        seed=0,
        started_unix_s=0.0,
        duration_s=2.0,
        requests=(answered, failed),
    )
    facts = facts_of(run, Slo.parse("ttft:200 tpot:50"))
    assert facts["failed_share"] == 0.5
    assert facts["ttft_p50_s"] == pytest.approx(0.5)
    assert facts["tpot_p50_s"] == pytest.approx(0.1)
    assert facts["queue_of_ttft_share"] == pytest.approx(0.6)
    assert facts["cached_prompt_share"] == 0.25
    assert facts["output_tok_s"] == 1.5
    assert facts["slo_ttft_s"] == 0.2
    assert "overhead_share" not in facts
