"""`ridgeline chat` with a model in this process: from a pipe, and on a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ridgeline.cli.main import main
from ridgeline.cli.render.chat import reply_figures
from ridgeline.records import Usage
from ridgeline.workflows.text.transcript import Reply

CHAT = ["chat", "demo", "--max-tokens", "6", "--kv-cache-memory-bytes", "16MiB"]
FIGURES = r"\d+ tokens · TTFT [\d,]+ ms"


def talk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *lines: str
) -> tuple[int, str, str]:
    """Exit code, answers and figures of a chat whose messages come from a pipe."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    code = main([*CHAT, "--num-threads", "1"])
    return code, *capsys.readouterr()


def test_piped_messages_are_answered_and_remembered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "talk.json"
    code, out, err = talk(
        monkeypatch, capsys, "def f():", "", "and\\", "again", f"/save {saved}", "/exit", "unread"
    )
    assert code == 0 and out and len(re.findall(FIGURES, err)) == 2
    messages = json.loads(saved.read_text())["turns"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert messages[0]["content"] == "def f():" and messages[2]["content"] == "and\nagain"


def test_commands_clear_the_conversation_and_set_the_system_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    code, _, err = talk(
        *(monkeypatch, capsys, "x", "/clear", f"/save {first}"),
        *("/system be kind", "y", f"/save {second}", "/help"),
    )
    assert code == 0 and "/system [TEXT]" in err
    assert json.loads(first.read_text())["turns"] == []
    messages = json.loads(second.read_text())["turns"]
    assert [message["content"] for message in messages[:2]] == ["be kind", "y"]


def test_an_unknown_command_in_a_pipe_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = talk(monkeypatch, capsys, "/nope")
    assert code == 2 and "unknown command; got '/nope'; limit: /help, /clear" in err


@pytest.mark.parametrize("flags", [["--served-model-name", "m"], ["--api-key", "k"]])
def test_options_of_a_server_need_a_url(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "demo", *flags]) == 2
    assert "without --url" in capsys.readouterr().err


def test_figures_say_why_an_answer_ended() -> None:
    usage = Usage(prompt_tokens=30, cached_tokens=20, completion_tokens=21)
    reply = Reply(text="abc", finish_reason="length", usage=usage, ttft_s=0.012, decode_s=0.1)
    assert reply_figures(reply) == (
        "21 tokens · TTFT 12 ms · 200.0 tok/s · 20 of 30 prompt tokens cached · cut off by "
        "--max-tokens"
    )
    none = Reply(
        text="",
        finish_reason="abort",
        usage=Usage(prompt_tokens=30, cached_tokens=0, completion_tokens=0),
        ttft_s=None,
        decode_s=0.0,
    )
    assert reply_figures(none) == "0 tokens · stopped"


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_keeps_the_conversation() -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "ridgeline", "chat", "demo", "--temperature", "0"]
    process = subprocess.Popen(
        [*command, "--max-tokens", "1500", "--num-threads", "1"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=accept_sigint,
        env={**os.environ, "TERM": "dumb"},
    )
    os.close(slave)
    try:
        read_until(master, "> ")
        os.write(master, b"class A:\n")
        read_until(master, "class A:\r\n", then=5)
        process.send_signal(signal.SIGINT)
        seen = read_until(master, "> ")
        assert "stopped" in seen
        os.write(master, b"/clear\n")
        assert "conversation cleared" in read_until(master, "> ")
        os.write(master, b"\x04")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)


def accept_sigint() -> None:
    """A test run in the background of a shell ignores SIGINT, and its children would too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def read_until(master: int, mark: str, *, then: int = 0, limit_s: float = 120.0) -> str:
    """What the terminal shows up to `mark` and `then` characters more."""
    seen, until = "", time.monotonic() + limit_s
    while mark not in seen or len(seen) < seen.index(mark) + len(mark) + then:
        ready, _, _ = select.select([master], [], [], max(0.0, until - time.monotonic()))
        assert ready, f"no {mark!r} in {seen!r}"
        seen += os.read(master, 4096).decode(errors="replace")
    return seen
