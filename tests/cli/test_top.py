"""`ridgeline top`: figures of a server, their trends, and the table."""

from __future__ import annotations

import io
import json
import math
import os
import sys
import termios
import threading

import httpx
import pytest
from rich.console import Console

from ridgeline.cli.commands.measure.key_presses import key_presses
from ridgeline.cli.main import main
from ridgeline.cli.render.measure.top import server_screen, server_table, sparkline
from ridgeline.config.server import RouteOptions, ServerOptions
from ridgeline.errors import BadInput
from ridgeline.fleet.app import GatewayService, create_gateway_app
from ridgeline.records.progress import Caution
from ridgeline.workflows.serving import watch_server as watching
from ridgeline.workflows.serving.server_figures import parse_metrics, quantile, server_figures
from ridgeline.workflows.serving.watch_server import (
    TREND_LENGTH,
    FigureTrends,
    ServerView,
    watch_server,
)
from tests.serve.conftest import engine, running, served  # noqa: F401  # fixtures


@pytest.mark.slow
def test_top_once_prints_one_table(served: str, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    for _ in range(3):
        httpx.post(f"{served}/v1/completions", json={"prompt": "a", "max_tokens": 5})
    look = ["top", "--url", served, "--once", "--interval", "0.05"]
    assert main([*look, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["running"], figures["finished"], figures["output_tok_s"]) == (1, 3, 0)
    assert (
        0 < figures["ttft_p50_s"] <= figures["ttft_p95_s"] < 5
        and "batch_requests_open" not in figures
    )
    assert main(look) == 0
    text = capsys.readouterr().out
    assert "ttft p95" in text and "since the server's start" in text
    assert main(["top", "--url", served, "--json"]) == 2


def test_missing_server_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    for once in (["--once"], []):
        assert main(["top", "--url", "http://127.0.0.1:9", *once]) == 2
        err = capsys.readouterr().err
        assert "no server answers" in err and "fix: start" in err


def test_server_without_metrics_is_an_error(
    served: str,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["top", "--url", f"{served}/elsewhere", "--once"]) == 2
    assert "/metrics responds with HTTP 404" in capsys.readouterr().err


def test_gateway_gets_an_error_that_names_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = ServerOptions()
    service = GatewayService(options)
    app = create_gateway_app(RouteOptions(backend=("http://127.0.0.1:9",)), service)
    with running(app, options, service) as url:
        assert main(["top", "--url", url, "--once"]) == 2
    assert f"ridgeline fleet top --url {url}" in "".join(capsys.readouterr().err.split("\n"))


def test_quantile_counts_observations_between_snapshots() -> None:
    before = {0.1: 10.0, 0.2: 10.0, float("inf"): 10.0}
    now = {0.1: 10.0, 0.2: 14.0, float("inf"): 15.0}
    assert quantile(now, before, 0.4) == pytest.approx(0.15)
    assert quantile(now, before, 0.95) == 0.2
    assert quantile(before, before, 0.5) is None and quantile({}, {}, 0.5) is None


def test_rate_is_between_two_snapshots() -> None:
    page = (
        'vllm:generation_tokens_total{model_name="a"} %d\n'
        "vllm:prefix_cache_queries_total %d\nvllm:prefix_cache_hits_total %d\n"
    )
    first = parse_metrics("# TYPE vllm:generation_tokens counter\n" + page % (10, 100, 0), 0.0)
    then = parse_metrics("# TYPE vllm:generation_tokens counter\n" + page % (30, 200, 50), 2.0)
    figures = server_figures(then, first, first)
    assert figures["output_tok_s"] == 10 and figures["hit_share"] == 0.5
    assert server_figures(then, None, None)["hit_share"] == 0.25


def test_trends_of_all_figures_have_equal_length() -> None:
    trends = FigureTrends()
    for update in range(TREND_LENGTH + 5):
        trends.add(
            {"running": float(update)} | ({"ttft_p95_s": 0.5} if update >= TREND_LENGTH else {})
        )
    trends.add({"running": 7.0})
    assert {len(values) for values in trends.by_name().values()} == {TREND_LENGTH}
    assert trends.by_name()["ttft_p95_s"][-7:] == (None, *[0.5] * 5, None)
    assert trends.by_name()["running"][-2:] == (TREND_LENGTH + 4.0, 7.0)


def test_shares_are_drawn_on_a_scale_to_one() -> None:
    assert sparkline([0.0, 0.5, 1.0, None, math.nan], "fill_share") == "▁▄█  "
    assert sparkline([0.0, 5.0, 10.0], "output_tok_s") == "▁▄█"
    assert sparkline([0.0, 0.0]) == "▁▁" and sparkline([]) == ""


def test_table_says_whether_the_slo_is_met() -> None:
    view = ServerView(
        figures={"ttft_p95_s": 0.1, "itl_p95_s": 0.06, "running": 2.0},
        trends={"running": (1.0, 2.0)},
        model="demo",
        slo_limits_s={"ttft_p95_s": 0.2, "itl_p95_s": 0.05},
    )
    out = io.StringIO()
    Console(file=out, width=120).print(server_table(view))
    rows = {line.split("  ")[0]: line for line in out.getvalue().splitlines()}
    assert "SLO met (200.0 ms)" in rows["ttft p95"]
    assert "SLO missed (50.0 ms)" in rows["itl p95"]
    assert "▄█" in rows["requests running"] and "ridgeline top · demo" in out.getvalue()


def test_watching_continues_while_the_server_is_down(
    served: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warnings: list[object] = []
    views = watch_server(served, interval_s=0.01, observer=warnings.append)
    assert next(views).figures == {} and "running" in next(views).figures
    answering, failures = watching._snapshot, iter([True, False])

    def snapshot(client: httpx.Client) -> object:
        if next(failures):
            raise BadInput("no server answers")
        return answering(client)

    monkeypatch.setattr(watching, "_snapshot", snapshot)
    assert "running" in next(views).figures
    assert [type(event) for event in warnings] == [Caution]


def test_screen_names_its_keys_and_explains_the_figures_on_request() -> None:
    view = ServerView(model="m", figures={"running": 1.0})
    for show_help in (False, True):
        console = Console(file=io.StringIO(), width=80)
        console.print(server_screen(view, show_help=show_help))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert "q quits" in text and ("time to first token" in text) == show_help


def test_keys_are_read_and_the_terminal_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, terminal = os.openpty()
    keys: list[str] = []
    pressed = threading.Event()

    def on_key(key: str) -> None:
        keys.append(key)
        pressed.set()

    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        before = termios.tcgetattr(terminal)
        with key_presses(on_key):
            assert termios.tcgetattr(terminal) != before
            os.write(keyboard, b"q")
            assert pressed.wait(5.0)
        assert termios.tcgetattr(terminal) == before and keys == ["q"]
    os.close(keyboard)
