"""What a newcomer gets wrong first: every error names the value and a fix that can be typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.cli.app import app
from ridgeline.cli.main import main
from ridgeline.cli.other_names import COMMANDS, OPTIONS
from ridgeline.errors import BadInput
from ridgeline.measure.client.http_target import key_refused
from ridgeline.records import Usage
from ridgeline.workflows.text.transcript import Reply
from tests.diagnose.mock_thread import mock_server


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "smollm2"], "did you mean chat?"),
        (["quantise", "demo"], "did you mean quantize?"),
        (["servee", "demo"], "did you mean serve?"),
        (["bench", "http://127.0.0.1:9"], "write --url http://127.0.0.1:9"),
        (["bench", "--url", "http://127.0.0.1:9"], "Connection refused"),
        (["serve", "llama-3.1-8b", "--port", "0"], "dummy:llama-3.1-8b is its shape"),
        (["serve", "qwen3.5-27b", "--port", "0"], "it is OWNER/REPO, as Qwen/Qwen3.5-27B"),
        (["serve", "dummy:nope", "--port", "0"], "predict --list-models"),
        (["generate", "demo"], 'ridgeline generate demo "def fib(n):"'),
        (["generate", "dummy:nope"], "needs a prompt after the model; got 'dummy:nope'"),
        (["generate", "smollm2"], "needs a prompt after the model"),
        (["plan", "llama-3.1-8b", "--random-input-len", "9"], "use --input-len"),
        (["simulate", "llama-3.1-8b", "--random-output-len", "9"], "use --output-len"),
        (["cost", "llama-3.1-8b"], "predict --list-models"),
        (["diagnose", "--run", "missing.jsonl"], "no such result file; got 'missing.jsonl'"),
        (["plan", "--model", "llama-3.1-8b"], "without an option: ridgeline plan MODEL"),
        (["generate", "-m", "demo"], "without an option: ridgeline generate MODEL"),
        (["serve", "demo", "-ctk", "q8_0"], "it is --kv-cache-dtype here"),
        (["serve", "demo", "--tp-size=2"], "it is --tensor-parallel-size here"),
        (["serve", "demo", "--mem-fraction-static", "0.8"], "--kv-cache-memory-bytes sets its"),
        (["bench", "--target", "http://127.0.0.1:9"], "it is --url here"),
        (["bench", "demo", "--trust-remote-code"], "code that comes with a model is never run"),
        (["quantize", "demo", "--tp", "2"], "ridgeline quantize --help lists them"),
        (["compare", "missing.json", "b.json"], "no such result file; got 'missing.json'"),
    ],
)
def test_error_names_what_to_type(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert words in last and "Errno" not in last


@pytest.mark.parametrize(("key", "words"), [(None, "requires an API key"), ("k", "refuses")])
def test_server_with_a_key_names_the_flag(key: str | None, words: str) -> None:
    error = key_refused("http://h", 401, key)
    assert isinstance(error, BadInput)
    assert words in str(error) and "--api-key" in str(error)


def test_json_of_bench_is_one_line_on_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--num-prompts", "4", "--num-warmups", "0", "--input-len", "8", "--output-len", "4"]
    written = tmp_path / "result.json"
    with mock_server(ttft_s=0.001, itl_s=0.001) as url:
        assert main(["bench", "--url", url, *load, "--json", "--output-json", str(written)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["completed"] == 4
    assert printed == json.loads(written.read_text())


def test_speed_of_a_short_answer_is_not_claimed() -> None:
    def reply(tokens: int) -> Reply:
        usage = Usage(prompt_tokens=1, completion_tokens=tokens, cached_tokens=0)
        return Reply(text="", finish_reason="stop", usage=usage, ttft_s=1.0, decode_s=0.0004)

    assert reply(4).tokens_per_s is None
    assert reply(101).tokens_per_s == pytest.approx(250_000)


def test_options_of_other_tools_lead_to_options_that_exist() -> None:
    opts = {opt for command in app.commands.values() for p in command.params for opt in p.opts}
    assert set(OPTIONS.values()) <= opts
    for name, command in app.commands.items():
        visible = {opt for p in command.params if not getattr(p, "hidden", False) for opt in p.opts}
        assert not [o for o, ours in OPTIONS.items() if {o, ours} <= visible], name


def test_commands_of_other_tools_lead_to_commands_that_exist() -> None:
    assert set(COMMANDS.values()) <= set(app.commands)
    assert not set(COMMANDS) & set(app.commands)
