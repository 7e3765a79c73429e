"""Tests of the rules for `promtool test rules`: what fires when everything fails, and what stays
silent when all is well, when there is no traffic, and when a fifth of the requests are bad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.operate.burn_rates import BURN_RATES
from ridgeline.operate.server_series import SERVERS, ServerName
from ridgeline.records import Slo


def build_rule_tests(
    server: ServerName, rules: Mapping[str, Any], classes: Mapping[str, Slo], rules_file: str
) -> dict[str, Any]:
    """The content of a test file for `rules`, which lie in `rules_file`."""
    alerts = [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    series = SERVERS[server]
    tests = [_absent(alerts)]
    if series.requests is not None:
        for name, slo in classes.items():
            tests += [
                _burn(series.alive, name, "all requests miss", (10, 0), num_firing=1),
                _burn(series.alive, name, "all requests meet", (10, 10), num_firing=0),
                _burn(series.alive, name, "no traffic", (0, 0), num_firing=0),
                _burn(series.alive, name, "a fifth misses", (10, 8), _num_firing(slo, 0.2)),
            ]
    return {"rule_files": [rules_file], "evaluation_interval": "1m", "tests": tests}


def _num_firing(slo: Slo, share: float) -> int:
    """Alerts with the window of an hour that fire while that share of the requests misses."""
    return int(share > BURN_RATES[0].factor * (1 - slo.attainment))


def _burn(
    alive: str, name: str, title: str, per_minute: tuple[int, int], num_firing: int
) -> dict[str, Any]:
    """After two hours, how many alerts with the window of an hour fire."""
    labels = f'{{model_name="m", slo_class="{name}"}}'
    return {
        "name": f"{name}: {title}",
        "interval": "1m",
        "input_series": [
            {"series": f'{alive}{{model_name="m"}}', "values": "1x300"},
            {
                "series": f"ridgeline_slo_requests_total{labels}",
                "values": f"0+{per_minute[0]}x300",
            },
            {"series": f"ridgeline_slo_met_total{labels}", "values": f"0+{per_minute[1]}x300"},
        ],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="SloBudgetBurns", slo_class="{name}", '
                f'window="1h", alertstate="firing"}}) or vector(0)',
                "eval_time": "2h",
                "exp_samples": [{"labels": "{}", "value": num_firing}],
            }
        ],
    }


def _absent(alerts: Sequence[Any]) -> dict[str, Any]:
    """Without any series only the alert that says so fires."""
    absent = next(alert for alert in alerts if alert["alert"] == "ServerAbsent")
    return {
        "name": "nothing is scraped",
        "interval": "1m",
        "input_series": [{"series": "unrelated", "values": "1x60"}],
        "alert_rule_test": [
            {
                "eval_time": "10m",
                "alertname": alert["alert"],
                "exp_alerts": [
                    {"exp_labels": alert["labels"], "exp_annotations": alert["annotations"]}
                ]
                if alert is absent
                else [],
            }
            for alert in {alert["alert"]: alert for alert in alerts}.values()
        ],
    }
