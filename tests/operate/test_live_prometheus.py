"""Alerts fire and dashboards show samples in a Prometheus that scrapes real servers."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from ridgeline.config.server import (
    RouteOptions,
    ServerOptions,
    TwinServerOptions,
    parse_slo_classes,
)
from ridgeline.fleet.app import GatewayService, create_gateway_app
from ridgeline.operate.dashboard import build_dashboard, queries_of
from ridgeline.operate.rules import build_rules
from ridgeline.operate.server_series import ServerName
from ridgeline.serve.app import create_app
from ridgeline.twin.servers.command_line import read_command
from ridgeline.workflows.serving.twin_of_server import open_twin
from tests.operate.prometheus import program, scraping, wait_for
from tests.serve.conftest import running
from tests.serve.fake_engine import FakeEngine

pytestmark = pytest.mark.slow

MODEL = "llama-3.1-8b"
COMMANDS: dict[ServerName, str] = {
    "vllm": f"vllm serve {MODEL}",
    "sglang": f"python3 -m sglang.launch_server --model-path {MODEL}",
    "tgi": f"text-generation-launcher --model-id {MODEL}",
}


def complete(url: str, count: int) -> None:
    """Send that many requests, and expect answers."""
    body = {"prompt": "ab", "max_tokens": 4}
    for _ in range(count):
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
        assert reply.status_code == 200, reply.text


def test_alert_fires_and_every_query_returns_samples_in_a_live_prometheus(tmp_path: Path) -> None:
    program("prometheus")
    classes = parse_slo_classes("chat=ttft:0.001 tpot:0.001")
    options = ServerOptions(slo_classes="chat=ttft:0.001 tpot:0.001")
    service = GatewayService(options)
    with ExitStack() as stack:
        url = stack.enter_context(running(create_app(FakeEngine(), options), options))
        app = create_gateway_app(RouteOptions(backend=(url,)), service)
        gateway = stack.enter_context(running(app, options, service))
        rules = build_rules("ridgeline", classes)
        prometheus = stack.enter_context(scraping(tmp_path, [url, gateway], rules))
        prometheus.wait("ridgeline_slo_requests_total", "ridgeline_fleet_parked")
        complete(gateway, 30)
        prometheus.wait('ALERTS{alertname="SloBudgetBurns",window="1h",alertstate="firing"}')
        queries = queries_of(build_dashboard("ridgeline", classes))
        assert len(queries) > 20
        assert not [expression for expression in queries if not prometheus.query(expression)]


def test_dashboards_of_other_servers_show_their_twins_in_a_live_prometheus(tmp_path: Path) -> None:
    program("prometheus")
    classes = parse_slo_classes("chat=e2e:5000")
    with ExitStack() as stack:
        urls = []
        for command in COMMANDS.values():
            options = ServerOptions(port=0, served_model_name=MODEL)
            twin = TwinServerOptions(command=command, speed=1000.0)
            app, engine, _ = open_twin(*read_command(command), twin, options)
            stack.callback(engine.close)
            urls.append(stack.enter_context(running(app, options)))
        prometheus = stack.enter_context(scraping(tmp_path, urls))
        queries = {s: queries_of(build_dashboard(s, classes)) for s in COMMANDS}
        prometheus.wait(*(f'up{{instance="{url.removeprefix("http://")}"}} == 1' for url in urls))
        for url in urls:
            complete(url, 5)
        expressions = {e for own in queries.values() for e in own}

        def lacking() -> list[str]:
            """The panels' expressions without a number."""
            samples = {e: prometheus.query(e) for e in expressions}
            values = {e: [float(own["value"][1]) for own in samples[e]] for e in expressions}
            return [
                e for e in expressions if not values[e] or not all(map(math.isfinite, values[e]))
            ]

        wait_for(lambda: not lacking())
