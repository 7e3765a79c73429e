"""`ridgeline chat` and `ridgeline top` against a server."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import httpx
import pytest
from rich.console import Console

from ridgeline.cli.commands.measure.top import Trends, figures, quantile, read_page
from ridgeline.cli.main import main
from ridgeline.cli.render.top import NUM_SHOWN, Served, Shown, spark, table
from tests.serve.conftest import engine, served  # noqa: F401  # fixtures
from tests.serve.fake_engine import ANSWER


def test_chat_answers_every_line(
    served: str,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nand again\n"))
    assert main(["chat", "--url", served, "--system", "be kind"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{ANSWER}\n{ANSWER}\n"
    told = rf"{len(ANSWER)} tokens · TTFT \d+ ms · [\d.,]+ tok/s · 3 of \d+ prompt tokens cached"
    assert len(re.findall(told, err)) == 2


def test_chat_says_why_there_is_no_answer(
    served: str,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for text, told in (("!fail\n", "lost"), ("x" * 999 + "\n", "too long")):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert main(["chat", "--url", served]) == 1
        assert told in capsys.readouterr().err


def test_chat_without_a_server_ends_before_anything_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unread = io.StringIO("hello\n")
    monkeypatch.setattr(sys, "stdin", unread)
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 2
    err = capsys.readouterr().err
    assert "no server answers" in err and "http://127.0.0.1:9" in err and "fix: start" in err
    assert unread.read() == "hello\n"


class Terse(BaseHTTPRequestHandler):
    """Lists no models, and says whose words they are with every piece."""

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        for piece in ("", "good ", "day"):
            delta = {"choices": [{"delta": {"role": "assistant", "content": piece}}]}
            self.wfile.write(f"data: {json.dumps(delta)}\n\n".encode())

    def log_message(self, *_: object) -> None:
        pass


def test_chat_with_a_server_that_repeats_the_role(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    with HTTPServer(("127.0.0.1", 0), Terse) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        assert main(["chat", "--url", f"http://127.0.0.1:{server.server_port}"]) == 0
        server.shutdown()
    out, err = capsys.readouterr()
    assert out == "good day\n" and "2 tokens" in err


def test_top_once(served: str, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    for _ in range(3):
        httpx.post(f"{served}/v1/completions", json={"prompt": "a", "max_tokens": 5})
    look = ["top", "--url", served, "--once", "--interval", "0.05"]
    assert main([*look, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["running"], told["finished"], told["output_tok_s"]) == (1, 3, 0)
    assert 0 < told["ttft_p50_s"] <= told["ttft_p95_s"] < 5 and "batch_lines_open" not in told
    assert main(look) == 0
    text = capsys.readouterr().out
    assert "ttft p95" in text and "since the server's start" in text
    assert main(["top", "--url", served, "--json"]) == 2


def test_top_of_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    for once in (["--once"], []):
        assert main(["top", "--url", "http://127.0.0.1:9", *once]) == 2
        err = capsys.readouterr().err
        assert "no server answers" in err and "fix: start" in err


def test_top_of_what_tells_no_figures(served: str, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert main(["top", "--url", f"{served}/elsewhere", "--once"]) == 2
    assert "/metrics says 404" in capsys.readouterr().err


def test_quantiles_are_of_what_came_between() -> None:
    before = {0.1: 10.0, 0.2: 10.0, float("inf"): 10.0}
    now = {0.1: 10.0, 0.2: 14.0, float("inf"): 15.0}
    assert quantile(now, before, 0.4) == pytest.approx(0.15)
    assert quantile(now, before, 0.95) == 0.2
    assert quantile(before, before, 0.5) is None and quantile({}, {}, 0.5) is None


def test_rates_and_shares() -> None:
    page = (
        'vllm:generation_tokens_total{model_name="a"} %d\n'
        "vllm:prefix_cache_queries_total %d\nvllm:prefix_cache_hits_total %d\n"
    )
    first = read_page("# TYPE vllm:generation_tokens counter\n" + page % (10, 100, 0), 0.0)
    then = read_page("# TYPE vllm:generation_tokens counter\n" + page % (30, 200, 50), 2.0)
    told = figures(then, first, first)
    assert told["output_tok_s"] == 10 and told["hit_share"] == 0.5
    assert figures(then, None, None)["hit_share"] == 0.25


def test_trends_stay_in_step_with_each_other() -> None:
    trends = Trends()
    for look in range(NUM_SHOWN + 5):
        trends.add({"running": float(look)} | ({"ttft_p95_s": 0.5} if look >= NUM_SHOWN else {}))
    trends.add({"running": 7.0})
    assert {len(values) for values in trends.by_name.values()} == {NUM_SHOWN}
    assert trends.by_name["ttft_p95_s"][-7:] == [None, *[0.5] * 5, None]
    assert trends.by_name["running"][-2:] == [NUM_SHOWN + 4.0, 7.0]


def test_a_share_is_drawn_against_the_whole() -> None:
    assert spark([0.0, 0.5, 1.0, None, math.nan], "fill_share") == "▁▄█  "
    assert spark([0.0, 5.0, 10.0], "output_tok_s") == "▁▄█"
    assert spark([0.0, 0.0]) == "▁▁" and spark([]) == ""


def test_top_judges_by_what_is_promised() -> None:
    of = Served("demo", {"ttft_p95_s": 0.2, "itl_p95_s": 0.05})
    told = {"ttft_p95_s": 0.1, "itl_p95_s": 0.06, "running": 2.0}
    trends = {"running": [1.0, 2.0]}
    out = io.StringIO()
    Console(file=out, width=120).print(table(Shown(told=told, trends=trends, served=of)))
    rows = {line.split("  ")[0]: line for line in out.getvalue().splitlines()}
    assert "kept (promised 200.0 ms)" in rows["ttft p95"]
    assert "missed (promised 50.0 ms)" in rows["itl p95"]
    assert "▄█" in rows["requests running"] and "ridgeline top · demo" in out.getvalue()


@pytest.mark.parametrize("command", [["chat"], ["top", "--once"]])
@pytest.mark.parametrize(
    "flags",
    [["--url", "http://h:x"], ["--url", "ftp://h"], ["--url", "http://h", "--api-key", "☃"]],
)
def test_an_address_or_a_key_that_cannot_be_is_refused(
    command: list[str], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *flags]) == 2
    assert re.search(
        "not a URL|not HTTP|not an HTTP address|printable ASCII", capsys.readouterr().err
    )
