"""`ridgeline chat` against a server."""

from __future__ import annotations

import io
import json
import re
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from ridgeline.cli.main import main
from tests.serve.conftest import engine, served  # noqa: F401  # fixtures
from tests.serve.fake_engine import ANSWER


@pytest.mark.slow
def test_chat_answers_every_line(
    served: str,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nand again\n"))
    assert main(["chat", "--url", served, "--system", "be kind"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{ANSWER}\n{ANSWER}\n"
    message = rf"{len(ANSWER)} tokens · TTFT \d+ ms · [\d.,]+ tok/s · 3 of \d+ prompt tokens cached"
    assert len(re.findall(message, err)) == 2


def test_chat_reports_why_there_is_no_answer(
    served: str,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for text, message in (("!fail\n", "lost"), ("x" * 999 + "\n", "too long")):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert main(["chat", "--url", served]) == 1
        assert message in capsys.readouterr().err


def test_chat_without_a_server_exits_at_once(
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


@pytest.mark.parametrize("command", [["chat"], ["top", "--once"]])
@pytest.mark.parametrize(
    "flags",
    [["--url", "http://h:x"], ["--url", "ftp://h"], ["--url", "http://h", "--api-key", "☃"]],
)
def test_invalid_url_or_api_key_is_rejected(
    command: list[str], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *flags]) == 2
    assert re.search(
        "not a URL|not HTTP|not an HTTP address|printable ASCII", capsys.readouterr().err
    )
