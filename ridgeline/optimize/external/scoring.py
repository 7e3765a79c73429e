"""Distributions of tokens from other servers, each in its own words.

  vllm, ridgeline   /v1/completions with prompt_logprobs
  sglang            /generate with return_logprob and top_logprobs_num
  tgi               /generate with decoder_input_details: only the log-probability of the text
  llama-server      /completion with n_probs: the answer only
  chat              /v1/chat/completions with top_logprobs: the answer only
  any other         /v1/completions with logprobs: the answer only

`score_text` reads every position of a text in one request. `continuation` reads the positions of a
greedy answer, which every server with log-probabilities can do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ridgeline.errors import CannotRun
from ridgeline.optimize.external.server_deployment import (
    TOP_LOGPROBS,
    ServerDeployment,
    post_blocking,
)
from ridgeline.optimize.quality.served_text import SMALLEST, Distribution, ScoredToken

OPENAI_LOGPROBS = 5  # the limit of OpenAI's completions


class ServerScorer:
    """Reads log-probabilities and answers from one server."""

    def __init__(self, url: str, model: str, kind: str, api_key: str | None = None) -> None:
        self.url, self.kind = url, kind
        self._model, self._api_key = model, api_key

    def score_text(self, text: str) -> list[ScoredToken]:
        """Every token of a text after the first. Raises CannotRun if the server cannot."""
        score = _SCORES.get(self.kind)
        if score is None:
            raise CannotRun("this server does not score a given text", value=self.kind)
        return score(self, text)

    def continuation(self, text: str, num_tokens: int) -> list[ScoredToken]:
        """The greedy continuation. Raises CannotRun if the server returns no log-probabilities."""
        rows = (_CONTINUATIONS.get(self.kind) or _continue_openai)(self, text, num_tokens)
        if not any(row.top for row in rows):
            raise CannotRun("this server returns no log-probabilities", value=self.url)
        return rows

    def answer(self, text: str, max_tokens: int) -> tuple[list[str], list[float]]:
        """The greedy continuation: token texts, and nats between the best two tokens of each."""
        rows = (_CONTINUATIONS.get(self.kind) or _continue_openai)(self, text, max_tokens)
        if not rows:
            raise CannotRun("this server returns no tokens with its answer", value=self.url)
        return [row.token for row in rows], [_gap(list(row.top.values())) for row in rows]

    @property
    def continues_output(self) -> bool:
        """Servers take a whole prompt: output that is given becomes part of it."""
        return False

    def complete(self, prompt: str, written: str, max_tokens: int) -> str:
        """The greedy output for a prompt, as text."""
        return "".join(self.answer(prompt + written, max_tokens)[0])

    def _complete(self, text: str, max_tokens: int, logprobs: int) -> dict[str, Any]:
        body = {
            "model": self._model,
            "prompt": text,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "logprobs": logprobs,
        }
        choices = self.post("/v1/completions", body).get("choices") or [{}]
        return dict(choices[0])

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return post_blocking(self.url, path, dict(body), self._api_key)

    def tokenize(self, text: str) -> list[int]:
        """The tokens of a text, as the server itself reads it."""
        return list(self.post("/tokenize", {"model": self._model, "prompt": text})["tokens"])

    def prompt_logprobs(self, tokens: Sequence[int]) -> list[Mapping[str, Any] | None]:
        """For every token of a prompt, the likeliest tokens in its place; None for the first."""
        body = {
            "model": self._model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": TOP_LOGPROBS,
        }
        choice = (self.post("/v1/completions", body).get("choices") or [{}])[0]
        return list(choice.get("prompt_logprobs") or ())


class DeploymentScorer(ServerScorer):
    """Reads log-probabilities and answers from a deployment, which is brought up when asked."""

    def __init__(self, deployment: ServerDeployment, kind: str) -> None:
        name, api_key = deployment.model
        super().__init__(name, name, kind, api_key)
        self._deployment = deployment

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return post_blocking(self._deployment.address(), path, dict(body), self._api_key)


# ---- texts -------------------------------------------------------------------------------------


def _score_vllm(server: ServerScorer, text: str) -> list[ScoredToken]:
    tokens = server.tokenize(text)
    scored = []
    for token, row in zip(tokens, server.prompt_logprobs(tokens), strict=False):
        if not row:
            continue  # nothing precedes the first token
        own = row[str(token)]
        top = {key: value["logprob"] for key, value in row.items()}
        if len(top) > TOP_LOGPROBS:
            del top[str(token)]  # named because it is in the text, not because it is likely
        scored.append(ScoredToken(token=str(token), logprob=own["logprob"], top=top))
    return _checked(scored, server)


def _score_sglang(server: ServerScorer, text: str) -> list[ScoredToken]:
    meta = _sglang(server, text, start=0)
    rows = zip(meta["input_token_logprobs"], meta["input_top_logprobs"], strict=True)
    scored = [
        ScoredToken(token=str(row[1]), logprob=row[0], top=_sglang_top(top))
        for row, top in rows
        if row[0] is not None
    ]
    return _checked(scored, server)


def _score_tgi(server: ServerScorer, text: str) -> list[ScoredToken]:
    parameters = {"max_new_tokens": 1, "details": True, "decoder_input_details": True}
    answer = server.post("/generate", {"inputs": text, "parameters": parameters})
    scored = [
        ScoredToken(token=str(row["id"]), logprob=row["logprob"], top={})
        for row in answer["details"].get("prefill") or ()
        if row.get("logprob") is not None
    ]
    return _checked(scored, server)


def _checked(scored: list[ScoredToken], server: ServerScorer) -> list[ScoredToken]:
    if not scored:
        raise CannotRun("this server returned no log-probabilities of a text", value=server.url)
    return scored


# ---- continuations -----------------------------------------------------------------------------


def _continue_openai(server: ServerScorer, text: str, num_tokens: int) -> list[ScoredToken]:
    logprobs = server._complete(text, num_tokens, OPENAI_LOGPROBS).get("logprobs") or {}
    tokens = logprobs.get("tokens") or ()
    tops = logprobs.get("top_logprobs") or [{}] * len(tokens)
    own = logprobs.get("token_logprobs") or [0.0] * len(tokens)
    return [
        ScoredToken(token=token, logprob=logprob, top=dict(top or {}))
        for token, logprob, top in zip(tokens, own, tops, strict=False)
    ]


def _continue_chat(server: ServerScorer, text: str, num_tokens: int) -> list[ScoredToken]:
    body = {
        "model": server._model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": num_tokens,
        "temperature": 0.0,
        "logprobs": True,
        "top_logprobs": TOP_LOGPROBS,
    }
    choice = (server.post("/v1/chat/completions", body).get("choices") or [{}])[0]
    return [
        ScoredToken(
            token=row["token"],
            logprob=row["logprob"],
            top={top["token"]: top["logprob"] for top in row.get("top_logprobs") or ()},
        )
        for row in (choice.get("logprobs") or {}).get("content") or ()
    ]


def _continue_tgi(server: ServerScorer, text: str, num_tokens: int) -> list[ScoredToken]:
    parameters = {"max_new_tokens": num_tokens, "details": True, "top_n_tokens": OPENAI_LOGPROBS}
    details = server.post("/generate", {"inputs": text, "parameters": parameters})["details"]
    tokens = details["tokens"]
    tops = details.get("top_tokens") or [()] * len(tokens)
    return [
        ScoredToken(
            token=row["text"],
            logprob=row.get("logprob") or 0.0,
            top={str(top["id"]): top["logprob"] for top in rows},
        )
        for row, rows in zip(tokens, tops, strict=False)
    ]


def _continue_llama(server: ServerScorer, text: str, num_tokens: int) -> list[ScoredToken]:
    body = {"prompt": text, "n_predict": num_tokens, "n_probs": TOP_LOGPROBS, "temperature": 0.0}
    rows = server.post("/completion", {**body, "cache_prompt": False})
    tokens = []
    for row in rows.get("completion_probabilities") or ():
        top = _llama_top(row)
        token = str(row.get("token", row.get("content", "")))
        own = row.get("logprob", max(top.values(), default=0.0))
        tokens.append(ScoredToken(token=token, logprob=own, top=top))
    return tokens


def _sglang(server: ServerScorer, text: str, start: int) -> dict[str, Any]:
    body = {
        "text": text,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": TOP_LOGPROBS,
    }
    return dict(server.post("/generate", body)["meta_info"])


def _sglang_top(rows: Sequence[Sequence[Any]] | None) -> Distribution:
    return {str(row[1]): row[0] for row in rows or ()}


def _llama_top(row: Mapping[str, Any]) -> Distribution:
    """Newer servers give `top_logprobs`, older ones `probs` with probabilities."""
    if "top_logprobs" in row:
        return {str(top["id"]): top["logprob"] for top in row["top_logprobs"]}
    rows = row.get("probs") or ()
    return {str(top["tok_str"]): math.log(max(top["prob"], SMALLEST)) for top in rows}


Score = Callable[[ServerScorer, str], list[ScoredToken]]
Continue = Callable[[ServerScorer, str, int], list[ScoredToken]]
_SCORES: Mapping[str, Score] = MappingProxyType(
    {"vllm": _score_vllm, "ridgeline": _score_vllm, "sglang": _score_sglang, "tgi": _score_tgi}
)
_CONTINUATIONS: Mapping[str, Continue] = MappingProxyType(
    {"chat": _continue_chat, "tgi": _continue_tgi, "llama-server": _continue_llama}
)


def _gap(logprobs: Sequence[float]) -> float:
    """Nats between the best two; infinite with fewer than two."""
    best = sorted(logprobs, reverse=True)[:2]
    return best[0] - best[1] if len(best) == 2 else math.inf
