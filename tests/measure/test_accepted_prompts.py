"""Servers that do not take every prompt: chat only, no token ids, refused fields, no usage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO

import msgspec
import pytest
from rich.console import Console

from ridgeline.cli.commands.measure.bench import run_bench
from ridgeline.cli.main import main
from ridgeline.config.load import BenchOptions, BenchReport
from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput, CannotRun
from ridgeline.measure.client.accepted_prompts import ANY_FORM, AcceptedPrompts, words_for
from ridgeline.measure.client.http_target import HttpTarget
from ridgeline.measure.mock.pace import MockPace
from ridgeline.measure.mock.server import MockServer
from ridgeline.measure.workload import parse_workload
from ridgeline.optimize.environment import Load
from ridgeline.optimize.external.server_deployment import (
    ModelAndKey,
    ServerAddress,
    ServerDeployment,
    ServerPrompts,
    server_info,
)
from ridgeline.workflows.bench.bench import bench
from ridgeline.workflows.load.load_session import prompt_forms
from ridgeline.workflows.targets import RemoteServer
from tests.diagnose.mock_thread import mock_server

FAST = MockPace(ttft_s=0.001, itl_s=0.001)
SYNTHETIC = BenchOptions(workload="synthetic:input=24,output=4", num_prompts=6, num_warmups=0)


class Gateway(MockServer):
    """Refuses what hosted endpoints and gateways refuse, and remembers the bodies it served."""

    def __init__(self, *, chat_only: bool = False, refuses: tuple[str, ...] = ()) -> None:
        super().__init__(FAST)
        self.bodies: list[dict[str, object]] = []
        self._chat_only, self._refuses = chat_only, refuses

    def refusal(self, path: str, body: bytes) -> tuple[int, bytes] | None:
        fields = msgspec.json.decode(body, type=dict[str, object])
        if self._chat_only and not path.startswith("/v1/chat"):
            return 404, b'{"detail": "Not Found"}'
        if isinstance(fields.get("prompt"), list) and "ids" in self._refuses:
            return 400, b'{"error": "prompt: expected a string"}'
        for name in self._refuses:
            if name in fields:
                instead = " Use 'max_completion_tokens' instead." if name == "max_tokens" else ""
                return 400, f"Unsupported parameter: '{name}'.{instead}".encode()
        self.bodies.append(fields)
        return None


@contextmanager
def served(gateway: Gateway) -> Iterator[str]:
    with mock_server(gateway) as url:
        yield url


def test_load_of_token_ids_becomes_words_for_a_server_that_only_chats() -> None:
    gateway, events = Gateway(chat_only=True), []
    with served(gateway) as url:
        result = bench(SYNTHETIC, RemoteServer(url=url), observer=events.append)
    assert result.summary.num_ok == 6
    assert result.summary.input_tokens == 6 * 24  # a word is a token to this server
    assert result.summary.counted_by == {"server": 6}
    assert all("messages" in body for body in gateway.bodies)
    assert any("as chat messages of as many common words" in str(event) for event in events)


def test_load_of_token_ids_becomes_text_for_a_server_that_takes_no_ids() -> None:
    gateway = Gateway(refuses=("ids",))
    with served(gateway) as url:
        result = bench(SYNTHETIC, RemoteServer(url=url, tokenizer="demo"))
    assert result.summary.num_ok == 6
    assert all(isinstance(body["prompt"], str) for body in gateway.bodies)
    assert result.normalised is not None and result.normalised.tokenizer == "demo"


@pytest.mark.parametrize("name", ["ignore_eos", "temperature", "stream_options", "max_tokens"])
def test_refused_field_is_left_out_or_renamed(name: str) -> None:
    gateway, events = Gateway(chat_only=True, refuses=(name,)), []
    with served(gateway) as url:
        result = bench(SYNTHETIC, RemoteServer(url=url), observer=events.append)
    assert result.summary.num_ok == 6
    assert not any(name in body for body in gateway.bodies)
    if name == "max_tokens":
        assert gateway.bodies[-1]["max_completion_tokens"] == 4
    else:
        assert any(name in str(event) for event in events)


def test_server_that_takes_nothing_is_an_error_that_lists_what_was_tried() -> None:
    gateway = Gateway(refuses=("model",))
    with served(gateway) as url, pytest.raises(BadInput, match="accepts no prompt") as caught:
        bench(SYNTHETIC, RemoteServer(url=url))
    for form in ("token ids to /v1/completions: HTTP 400", "text to", "messages to /v1/chat"):
        assert form in str(caught.value)


def test_closed_port_and_refused_key_are_named() -> None:
    class Keyed(Gateway):
        def refusal(self, path: str, body: bytes) -> tuple[int, bytes] | None:
            return 401, b"no"

    with served(Keyed()) as url, pytest.raises(BadInput, match="--api-key"):
        bench(SYNTHETIC, RemoteServer(url=url))
    with pytest.raises(BadInput, match="does not answer"):
        bench(SYNTHETIC, RemoteServer(url="http://127.0.0.1:9", model="m"))


def test_forms_follow_the_load_and_the_endpoint() -> None:
    chats = BenchOptions(workload="chat-and-code")
    assert prompt_forms(SYNTHETIC, "auto") == ("tokens", "text", "chat")
    assert prompt_forms(SYNTHETIC, "completions") == ("tokens", "text")
    assert prompt_forms(SYNTHETIC, "chat") == ("chat",)
    assert prompt_forms(chats, "auto")[-1] == "chat"


def test_missing_usage_is_counted_by_the_tokenizer_or_flagged() -> None:
    def printed(server: RemoteServer) -> str:
        console = Console(record=True, width=200, file=StringIO())
        assert run_bench(SYNTHETIC, server, BenchReport(), console) == 0
        return console.export_text()

    with mock_server() as url:
        guessed = printed(RemoteServer(url=url, model="no-usage"))
        counted = printed(RemoteServer(url=url, model="no-usage", tokenizer="demo"))
        by_server = printed(RemoteServer(url=url, tokenizer="demo"))
    assert "counted by" in guessed and "one per chunk" in guessed
    assert "lower bound; --tokenizer MODEL counts them" in guessed
    assert "the tokenizer" in counted and "lower bound" not in counted
    assert "the server's usage" in by_server
    assert "as the tokenizer of demo counts the answers" in by_server


def test_tokenizer_needs_a_server_and_a_readable_tokenizer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "demo", "--tokenizer", "demo"]) == 2
    assert "--url" in capsys.readouterr().err
    address = ["--url", "http://127.0.0.1:9"]
    assert main(["bench", *address, "--tokenizer", "dummy:qwen3-0.6b"]) == 2
    assert "without a readable tokenizer" in capsys.readouterr().err


def test_equal_ids_are_equal_words() -> None:
    assert words_for((1, 2, 1)).split()[0] == words_for((1,))
    assert len(words_for(range(500)).split()) == 500


def deployment(url: str, form_words: ServerPrompts) -> ServerDeployment:
    info = server_info(Settings(model="demo"), {}, "steady")
    address = ServerAddress(url, 1)
    return ServerDeployment(lambda: address, ModelAndKey("steady"), form_words, info, {}, 10)


async def test_optimize_measures_a_server_that_only_chats() -> None:
    tokens = parse_workload("synthetic:input=8,output=4")
    gateway = Gateway(chat_only=True, refuses=("logprobs",))
    with served(gateway) as url:
        chats = deployment(url, ServerPrompts(tokens, tokens))
        load = Load(rate=100.0, seed=1, window_s=0.05, grace_s=1.0)
        run = await chats.run(load)
        assert all(request.error is None for request in run.requests)
        (greedy,) = await chats.greedy([(5, 6, 7)], 4)
        assert len(greedy) == len("ab ab ab ab ")  # characters stand for tokens
        with pytest.raises(CannotRun, match="takes no token ids"):
            chats.logprobs_of([1, 2, 3])


async def test_negotiation_ends_at_the_first_accepted_form() -> None:
    gateway = Gateway()
    with served(gateway) as url:
        target = HttpTarget(url, "steady")
        assert await target.negotiate(ANY_FORM) == AcceptedPrompts("tokens")
        await target.close()
    assert len(gateway.bodies) == 1
