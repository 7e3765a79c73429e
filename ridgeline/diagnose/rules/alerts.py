"""The rules that a server's metrics show, as alerting rules of Prometheus.

The names in `alert.expr` stand for the server's own metrics (measure/monitors/metric_names.toml):

    {running} {waiting} {kv_used_share}     gauges
    {preemptions_per_s} {requests_per_s}    rates of counters over five minutes
    {waiting_growth_per_s}                  slope of the queue over ten minutes
    {ttft_p95_s} {tpot_p95_s} {itl_p99_s} … percentiles of histograms over five minutes
    {slo_ttft_s} {slo_tpot_s}               limits of the SLO

A rule whose names the server does not report, or whose limits the SLO does not give, is left out
with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ridgeline.diagnose.conditions import named_in
from ridgeline.diagnose.rules.rulebook import Rule, Server, shipped_rules
from ridgeline.measure.monitors.server_metrics import metric_names
from ridgeline.records import Slo

WINDOW, QUEUE_WINDOW = "5m", "10m"
HISTOGRAMS = {"ttft": "ttft_s", "tpot": "tpot_s", "itl": "itl_s", "queue": "queue_s"}
_PERCENTILE = re.compile(r"(ttft|tpot|itl|queue|loop_lag)_p(\d+)_s")


class AlertRules(msgspec.Struct, frozen=True, kw_only=True):
    """Alerting rules of one server. `left_out`: rules that it cannot show, with the reason."""

    rules: tuple[AlertRule, ...]
    left_out: dict[str, str]


class AlertRule(msgspec.Struct, frozen=True, kw_only=True):
    """One alerting rule: name, condition and remedy of a row of the rule book."""

    name: str
    expr: str
    lasts: str
    severity: str
    verdict: str
    summary: str
    remedy: str

    @property
    def prometheus(self) -> dict[str, Any]:
        """The rule as Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.lasts,
            "labels": {"severity": self.severity, "verdict": self.verdict},
            "annotations": {"summary": self.summary, "description": self.remedy},
        }


def alert_rules(server: Server = "ridgeline", slo: Slo | None = None) -> AlertRules:
    """The alerts that this server's metrics allow."""
    known = _expressions(server) | _limits(slo)
    rules, left_out = [], {}
    for rule in shipped_rules():
        if rule.alert is None:
            continue
        missing = sorted(named_in(rule.alert.expr) - set(known))
        if missing:
            left_out[rule.id] = ", ".join(missing) + " unknown"
        else:
            rules.append(_render(rule, known, server))
    return AlertRules(rules=tuple(rules), left_out=left_out)


def _render(rule: Rule, known: Mapping[str, str], server: Server) -> AlertRule:
    assert rule.alert is not None
    return AlertRule(
        name="".join(part.capitalize() for part in rule.id.split("-")),
        expr=re.sub(r"\{(\w+)\}", lambda match: known[match[1]], rule.alert.expr),
        lasts=rule.alert.lasts,
        severity=rule.alert.severity,
        verdict=rule.verdict,
        summary=f"{rule.verdict}: {rule.id.replace('-', ' ')}",
        remedy=f"{rule.fix} Here: {rule.flag_for(server)}. Will not help: {rule.not_help}",
    )


def _expressions(server: Server) -> dict[str, str]:
    """PromQL by our names, of what this server reports; sums over replicas."""
    own = {name: stems[0] for name, stems in metric_names().get(server, {}).items()}
    known = {name: f"sum({own[name]})" for name in ("running", "waiting") if name in own}
    if "kv_used_share" in own:
        known["kv_used_share"] = f"max({own['kv_used_share']})"
    if "waiting" in own:
        known["waiting_growth_per_s"] = f"sum(deriv({own['waiting']}[{QUEUE_WINDOW}]))"
    for name, counter in (("preemptions", "preemptions"), ("requests", "finished_requests")):
        if counter in own:
            known[f"{name}_per_s"] = f"sum(rate({own[counter]}[{WINDOW}]))"
    for rule in shipped_rules():
        for name in named_in(rule.alert.expr) if rule.alert else ():
            match = _PERCENTILE.fullmatch(name)
            if match is not None and f"{match[1]}_s" in own:
                stem, q = own[f"{match[1]}_s"], int(match[2]) / 100
                known[name] = (
                    f"histogram_quantile({q:g}, sum by (le) (rate({stem}_bucket[{WINDOW}])))"
                )
    return known


def _limits(slo: Slo | None) -> dict[str, str]:
    limits = {} if slo is None else {"slo_ttft_s": slo.ttft_s, "slo_tpot_s": slo.tpot_s}
    return {name: f"{limit:g}" for name, limit in limits.items() if limit is not None}
