"""Alert rules and dashboards: promtool accepts and tests them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ridgeline.config.server import parse_slo_classes
from ridgeline.diagnose import alert_rules
from ridgeline.errors import BadInput
from ridgeline.measure.monitors.server_metrics import metric_names
from ridgeline.operate.dashboard import build_dashboard, queries_of
from ridgeline.operate.rule_tests import build_rule_tests
from ridgeline.operate.rules import build_rules, strictest
from ridgeline.operate.server_series import SERVERS, ServerName
from ridgeline.operate.yaml_text import to_yaml
from tests.operate.prometheus import program

CLASSES: dict[ServerName, str] = {
    "ridgeline": "chat=ttft:500 tpot:50;bulk=e2e:60000 attainment:0.99;hard=ttft:9 attainment:0.99",
    "vllm": "chat=ttft:500 tpot:50",
    "sglang": "chat=ttft:500 e2e:9000",
    "tgi": "chat=e2e:5000",
}


@pytest.mark.parametrize("server", SERVERS)
def test_promtool_accepts_and_passes_the_rules(server: ServerName, tmp_path: Path) -> None:
    promtool = program("promtool")
    classes = parse_slo_classes(CLASSES[server])
    rules = build_rules(server, classes)
    tests = build_rule_tests(server, rules, classes, "rules.yaml")
    (tmp_path / "rules.yaml").write_text(to_yaml(rules))
    (tmp_path / "rules_test.yaml").write_text(to_yaml(tests))
    for arguments in (["check", "rules", "rules.yaml"], ["test", "rules", "rules_test.yaml"]):
        result = subprocess.run(
            [promtool, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr


def test_a_rule_that_never_fires_fails_its_test(tmp_path: Path) -> None:
    promtool = program("promtool")
    classes = parse_slo_classes("chat=ttft:500")
    rules = build_rules("ridgeline", classes)
    text = to_yaml(rules).replace("> 0.72 ", "> 1.1 ")
    assert text != to_yaml(rules)
    (tmp_path / "rules.yaml").write_text(text)
    tests = build_rule_tests("ridgeline", rules, classes, "rules.yaml")
    (tmp_path / "rules_test.yaml").write_text(to_yaml(tests))
    command = [promtool, "test", "rules", "rules_test.yaml"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode


@pytest.mark.parametrize(
    ("server", "classes", "says"),
    [
        ("ridgeline", "chat=ttft:500 attainment:0.9", "1/14.4"),
        ("ridgeline", "chat=ttft:500 attainment:1", "attainment"),
        ("ridgeline", "", "--slo-classes"),
        ("vllm", "a=ttft:1;b=ttft:2", "does not tell requests of different classes apart"),
        ("tgi", "a=ttft:500", "does not measure ttft"),
    ],
)
def test_rules_that_could_not_work_are_refused(server: ServerName, classes: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        build_rules(server, parse_slo_classes(classes))


@pytest.mark.parametrize("server", SERVERS)
def test_causes_are_those_of_the_rule_book(server: ServerName) -> None:
    classes = parse_slo_classes(CLASSES[server])
    groups = {group["name"]: group["rules"] for group in build_rules(server, classes)["groups"]}
    known = {rule.name for rule in alert_rules(server, strictest(classes)).rules}
    assert {rule["alert"] for rule in groups[f"{server}-causes"]} == known
    names = [rule["alert"] for rules in groups.values() for rule in rules if "alert" in rule]
    assert "TooFewSlots" in names or server == "tgi"


def test_causes_watch_the_strictest_class() -> None:
    slo = strictest(parse_slo_classes("a=ttft:500;b=ttft:200 tpot:40;c=e2e:9000"))
    assert (slo.ttft_s, slo.tpot_s) == (0.2, 0.04)


@pytest.mark.parametrize("server", SERVERS)
def test_series_are_named_as_diagnose_reads_them(server: ServerName) -> None:
    series, read = SERVERS[server], metric_names()[server]
    pairs = {
        "running": series.running,
        "waiting": series.waiting,
        "kv_used_share": series.kv_usage,
        "preemptions": series.preemptions,
        "hit_tokens": series.prefix_hits,
        "queried_tokens": series.prefix_queries,
        "output_tokens": series.output_tokens,
        "ttft_s": series.ttft,
        "tpot_s": series.tpot,
    }
    both = {name for name, metric in pairs.items() if metric is not None and name in read}
    assert {"running", "waiting"} <= both
    for name in both:
        assert read[name][0] == pairs[name], name


@pytest.mark.parametrize("server", SERVERS)
def test_dashboards_have_unique_panels_and_parse(server: ServerName) -> None:
    dashboard = build_dashboard(server, parse_slo_classes(CLASSES[server]))
    assert json.loads(json.dumps(dashboard)) == dashboard
    ids = [panel["id"] for panel in dashboard["panels"]]
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids) and len(set(places)) == len(places)
    assert all(
        expression.count("(") == expression.count(")") for expression in queries_of(dashboard)
    )


def missing_of(given: Any, read: Any, path: str = "") -> Iterator[str]:
    """Where `read`, which a typed library has made of `given`, has lost or changed something."""
    if isinstance(given, dict) and isinstance(read, dict):
        for key, value in given.items():
            yield from missing_of(value, read.get(key), f"{path}.{key}")
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for number, pair in enumerate(zip(given, read, strict=True)):
            yield from missing_of(*pair, f"{path}[{number}]")
    elif given != read:
        yield path


@pytest.mark.parametrize("server", SERVERS)
def test_grafanas_types_know_every_field_of_a_dashboard(server: ServerName) -> None:
    dashboards = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    from grafana_foundation_sdk.cog import encoder, plugins

    plugins.register_default_plugins()

    def read(dashboard: dict[str, Any]) -> Any:
        parsed = dashboards.Dashboard.from_json(dashboard)
        return json.loads(encoder.JSONEncoder().encode(parsed))

    dashboard = build_dashboard(server, parse_slo_classes(CLASSES[server]))
    assert not list(missing_of(dashboard, read(dashboard)))
    dashboard["panels"][0]["fieldConfg"] = {}
    assert list(missing_of(dashboard, read(dashboard))) == [".panels[0].fieldConfg"]


@pytest.mark.parametrize("server", SERVERS)
def test_guide_on_call_names_every_alert(server: ServerName) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "on-call.md").read_text()
    rules = build_rules(server, parse_slo_classes(CLASSES[server]))
    alerts = {
        rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule
    }
    assert alerts and not [name for name in alerts if f"`{name}`" not in guide]
