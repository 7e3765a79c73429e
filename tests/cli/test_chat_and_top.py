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


class Scripted(BaseHTTPRequestHandler):
    """Sends `body` as the stream of every answer."""

    body = b""

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


def answered(
    body: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """Exit code and output of one message to a server that streams `body`."""
    monkeypatch.setattr(Scripted, "body", body.encode())
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    with HTTPServer(("127.0.0.1", 0), Scripted) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        code = main(["chat", "--url", f"http://127.0.0.1:{server.server_port}"])
        server.shutdown()
    return code, *capsys.readouterr()


def test_chat_reads_streams_however_they_are_framed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Comments, no space after the colon, \\r\\n, data over two lines, a line separator in JSON."""
    body = (
        ": ping\r\n\r\n"
        'data:{"choices":[{"delta":{"content":"a\u2028b"}}]}\r\n\r\n'
        'data: {"choices":\ndata: [{"delta":{"content":"c"},"finish_reason":"length"}]}\n\n'
        "data: [DONE]\n\n"
    )
    code, out, err = answered(body, monkeypatch, capsys)
    assert (code, out) == (0, "a\u2028bc\n") and "cut off by --max-tokens" in err


def test_chat_shows_and_remembers_no_reasoning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = (
        'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n'
        'data: {"choices":[{"delta":{"content":"yes"},"finish_reason":"stop"}]}\n\n'
    )
    code, out, _ = answered(body, monkeypatch, capsys)
    assert (code, out) == (0, "yes\n")


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        ("data: not json", "malformed"),
        ('data: {"choices": 3}', "malformed"),
        ('data: {"error": {"message": "out of memory"}}', "out of memory"),
        ('data: {"choices":[{"delta":{},"finish_reason":"error"}]}', "with an error"),
    ],
)
def test_chat_reports_streams_that_fail(
    chunk: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = answered(f"{chunk}\n\n", monkeypatch, capsys)
    assert code == 1 and message in err and "Traceback" not in err


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
