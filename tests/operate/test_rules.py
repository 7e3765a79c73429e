"""Alert rules: promtool accepts and tests them, and one fires in a live Prometheus."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.config.server import RouteOptions, ServerOptions, parse_slo_classes
from ridgeline.diagnose import alert_rules
from ridgeline.errors import BadInput
from ridgeline.fleet.app import GatewayService, create_gateway_app
from ridgeline.measure.monitors.server_metrics import metric_names
from ridgeline.operate.dashboard import build_dashboard, queries_of
from ridgeline.operate.rule_tests import build_rule_tests
from ridgeline.operate.rules import build_rules, strictest
from ridgeline.operate.server_series import SERVERS, ServerName
from ridgeline.operate.yaml_text import to_yaml
from ridgeline.serve.app import create_app
from tests.serve.conftest import running
from tests.serve.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]
CLASSES: dict[ServerName, str] = {
    "ridgeline": "chat=ttft:500 tpot:50;bulk=e2e:60000 attainment:0.99;hard=ttft:9 attainment:0.99",
    "vllm": "chat=ttft:500 tpot:50",
    "sglang": "chat=ttft:500 e2e:9000",
    "tgi": "chat=e2e:5000",
}


def program(name: str) -> str:
    """The path of a program of Debian's package prometheus; `make prometheus` fetches it."""
    fetched = ROOT / "build" / "prometheus" / "usr" / "bin" / name
    path = str(fetched) if fetched.exists() else shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not here: make prometheus")
    return path


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


def _wait(condition: Callable[[], Any], timeout_s: float = 60) -> Any:
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s
        time.sleep(0.25)
    return value


@pytest.mark.slow
def test_alert_fires_and_every_query_returns_samples_in_a_live_prometheus(tmp_path: Path) -> None:
    prometheus = program("prometheus")
    classes = parse_slo_classes("chat=ttft:0.001 tpot:0.001")
    (tmp_path / "rules.yaml").write_text(to_yaml(build_rules("ridgeline", classes)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    options = ServerOptions(slo_classes="chat=ttft:0.001 tpot:0.001")
    service = GatewayService(options)
    with (
        running(create_app(FakeEngine(), options), options) as url,
        running(
            create_gateway_app(RouteOptions(backend=(url,)), service), options, service
        ) as gateway,
    ):
        targets = [each.removeprefix("http://") for each in (url, gateway)]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [
                {
                    "job_name": "ridgeline",
                    "static_configs": [{"targets": targets}],
                }
            ],
        }
        (tmp_path / "prometheus.yml").write_text(to_yaml(config))
        address = f"127.0.0.1:{port}"
        process = subprocess.Popen(
            [
                prometheus,
                "--config.file=prometheus.yml",
                f"--web.listen-address={address}",
                "--storage.tsdb.path=data",
            ],
            cwd=tmp_path,
            stderr=subprocess.DEVNULL,
        )
        try:
            _check_live(f"http://{address}", gateway, classes)
        finally:
            process.terminate()
            process.wait(30)


def _check_live(prometheus: str, url: str, classes: dict[str, Any]) -> None:
    def query(expression: str) -> list[Any]:
        reply = httpx.get(f"{prometheus}/api/v1/query", params={"query": expression})
        assert reply.status_code in (200, 503), reply.text
        if reply.status_code == 503:  # Prometheus is starting
            return []
        result: list[Any] = reply.json()["data"]["result"]
        return result

    def is_up() -> bool:
        try:
            return all(map(query, ("ridgeline_slo_requests_total", "ridgeline_fleet_parked")))
        except httpx.HTTPError:
            return False

    _wait(is_up)
    for _ in range(30):
        reply = httpx.post(f"{url}/v1/completions", json={"prompt": "ab", "max_tokens": 4})
        assert reply.status_code == 200, reply.text
    firing = 'ALERTS{alertname="SloBudgetBurns",window="1h",alertstate="firing"}'
    _wait(lambda: query(firing))
    dashboard = build_dashboard("ridgeline", classes)
    queries = queries_of(dashboard)
    assert len(queries) > 20
    empty = [expression for expression in queries if not query(expression)]
    assert not empty
