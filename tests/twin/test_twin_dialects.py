"""What only SGLang, TGI and llama.cpp answer: the twins' own routes, read by the gate's scorer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.testclient import TestClient

from ridgeline.config.server import ServerOptions, TwinServerOptions
from ridgeline.errors import CannotRun
from ridgeline.optimize.external.scoring import ServerScorer
from ridgeline.optimize.quality.served_text import ScoredToken
from ridgeline.twin.servers.command_line import find_command
from ridgeline.workflows.serving.twin_of_server import open_twin

MODEL = "llama-3.1-8b"
TEXT = "The quick brown fox jumps over the lazy dog"
COMMANDS = {
    "vllm": f"vllm serve {MODEL}",
    "sglang": f"sglang serve --model-path {MODEL}",
    "tgi": f"text-generation-launcher --model-id {MODEL}",
    "llama-server": f"llama-server -m {MODEL}",
}


class TwinScorer(ServerScorer):
    """The gate's scorer over a twin in this process."""

    def __init__(self, client: TestClient, kind: str) -> None:
        super().__init__("http://127.0.0.1", MODEL, kind)
        self.client = client

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        reply = self.client.post(path, json=dict(body))
        if reply.status_code != 200:
            raise CannotRun(f"the server refused {path}", value=reply.text)
        return dict(reply.json())


@contextmanager
def twin(server: str, flags: str = "", *, chat_only: bool = False) -> Iterator[TwinScorer]:
    with twin_of_command(f"{COMMANDS[server]} {flags}", server, chat_only=chat_only) as scorer:
        yield scorer


@contextmanager
def twin_of_command(command: str, dialect: str, *, chat_only: bool = False) -> Iterator[TwinScorer]:
    """The twin of a command line in this process, read in a dialect of the scorer."""
    found = find_command(command)
    assert found is not None
    options = TwinServerOptions(command="", device="l4", speed=1000.0, chat_only=chat_only)
    server_options = ServerOptions(port=0, served_model_name=MODEL)
    app, engine, _ = open_twin(*found, options, server_options)
    try:
        yield TwinScorer(TestClient(app, base_url="http://127.0.0.1"), dialect)
    finally:
        engine.close()


def scores(rows: list[ScoredToken]) -> list[tuple[str, float]]:
    return [(row.token, pytest.approx(row.logprob, abs=1e-6)) for row in rows]


def test_texts_are_scored_as_vllm_scores_them() -> None:
    """One synthetic model behind all twins: every dialect tells the same numbers."""
    with twin("vllm") as vllm, twin("sglang") as sglang, twin("tgi") as tgi:
        reference = vllm.score_text(TEXT)
        assert len(reference) > 5
        rows = sglang.score_text(TEXT)
        assert [(row.token, row.logprob) for row in rows] == scores(reference)
        assert [row.top for row in rows] == [pytest.approx(row.top) for row in reference]
        assert [(row.token, row.logprob) for row in tgi.score_text(TEXT)] == scores(reference)


def test_greedy_answers_are_those_of_openai_completions() -> None:
    with twin("tgi") as tgi, twin("llama-server") as llama:
        openai = TwinScorer(llama.client, "openai").continuation(TEXT, 6)
        answers = {scorer.kind: scorer.continuation(TEXT, 6) for scorer in (tgi, llama)}
        for kind, rows in answers.items():
            assert kind == "tgi" or [row.token for row in rows] == [row.token for row in openai]
            assert [row.logprob for row in rows] == pytest.approx([r.logprob for r in openai]), kind
            assert all(len(row.top) > 1 for row in rows), kind


def test_answer_has_the_form_of_its_server() -> None:
    body = {"text": TEXT, "sampling_params": {"max_new_tokens": 3, "temperature": 0}}
    with twin("sglang") as scorer:
        plain = scorer.post("/generate", body)
        assert plain["text"] and len(plain["output_ids"]) == 3
        assert plain["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
        assert "input_token_logprobs" not in plain["meta_info"]
        wanted = body | {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
        meta = scorer.post("/generate", wanted)["meta_info"]
        assert meta["input_token_logprobs"][0][0] is None
        assert meta["input_top_logprobs"][0] is None
        assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
        assert [len(row) for row in meta["output_top_logprobs"]] == [2, 2, 2]
        ids = scorer.post("/generate", {"input_ids": [5, 6], "sampling_params": {}})
        assert ids["meta_info"]["prompt_tokens"] == 2
    with twin("llama-server") as scorer:
        reply = scorer.post("/completion", {"prompt": TEXT, "n_predict": 2, "n_probs": 3})
        assert reply["stop_type"] == "limit" and reply["tokens_predicted"] == 2
        [first, _] = reply["completion_probabilities"]
        assert bytes(first["bytes"]).decode() == first["token"]
        assert len(first["top_logprobs"]) == 3


@pytest.mark.parametrize(
    ("server", "path", "body"),
    [
        ("sglang", "/generate", {"sampling_params": {}}),
        ("sglang", "/generate", {"text": TEXT, "stream": True}),
        ("tgi", "/generate", {"parameters": {}}),
        ("llama-server", "/completion", {"prompt": TEXT, "n_probs": 99}),
    ],
)
def test_body_that_cannot_be_answered_is_refused(
    server: str, path: str, body: dict[str, Any]
) -> None:
    with twin(server) as scorer:
        assert scorer.client.post(path, json=body).status_code == 400


def test_chat_only_twin_has_no_completions() -> None:
    with twin("sglang", chat_only=True) as scorer:
        paths = ("/v1/completions", "/generate", "/tokenize")
        body = {"model": MODEL, "prompt": TEXT, "text": TEXT}
        assert [scorer.client.post(path, json=body).status_code for path in paths] == [404] * 3
        chat = TwinScorer(scorer.client, "chat").continuation(TEXT, 4)
        assert len(chat) == 4 and all(row.top for row in chat)
