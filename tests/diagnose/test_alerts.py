"""Alerts are rows of the rule book, with the server's own metric names."""

from __future__ import annotations

import re

import pytest

from ridgeline.diagnose import alert_rules
from ridgeline.diagnose.rules.rulebook import shipped_rules
from ridgeline.measure.monitors.server_metrics import metric_names
from ridgeline.records import Slo

SLO = Slo.parse("ttft:500 tpot:50")
FUNCTIONS = {"sum", "by", "le", "rate", "deriv", "max", "histogram_quantile", "and"}


@pytest.mark.parametrize("server", sorted(metric_names()))
def test_every_alert_is_written_or_left_out_with_a_reason(server: str) -> None:
    made = alert_rules(server, SLO)  # type: ignore[arg-type]
    with_alert = {rule.id for rule in shipped_rules() if rule.alert}
    assert len(made.rules) + len(made.left_out) == len(with_alert)
    assert all(why.endswith("unknown") for why in made.left_out.values())
    assert made.rules or server == "tensorrt-llm"


@pytest.mark.parametrize("server", ["ridgeline", "vllm", "sglang"])
def test_expressions_name_only_metrics_of_the_server(server: str) -> None:
    own = {name for names in metric_names()[server].values() for name in names}
    for rule in alert_rules(server, SLO).rules:  # type: ignore[arg-type]
        assert "{" not in rule.expr
        assert rule.expr.count("(") == rule.expr.count(")")
        bare = re.sub(r"\[\w+\]", "", rule.expr)
        for word in re.findall(r"[a-z_][\w:]*", bare):
            assert word in FUNCTIONS or word.removesuffix("_bucket") in own, (rule.name, word)


def test_rule_has_the_fields_of_prometheus() -> None:
    by_name = {rule.name: rule.prometheus for rule in alert_rules("vllm", SLO).rules}
    slots = by_name["TooFewSlots"]
    assert slots["expr"] == (
        "sum(vllm:num_requests_waiting) > 0.5 * sum(vllm:num_requests_running) and "
        "max(vllm:kv_cache_usage_perc) < 0.9"
    )
    assert slots["for"] == "5m" and slots["labels"]["verdict"] == "queue-bound"
    assert "--max-num-seqs" in slots["annotations"]["description"]


def test_limits_of_the_slo_are_seconds_and_needed() -> None:
    with_slo = {rule.name: rule.expr for rule in alert_rules("vllm", SLO).rules}
    assert "> 0.05 and" in with_slo["OverBatched"]
    assert alert_rules("vllm").left_out["over-batched"] == "slo_tpot_s unknown"
