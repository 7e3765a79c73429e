"""Distributions of tokens from other servers, each in its own words.

  vllm, ridgeline   /v1/completions with prompt_logprobs
  sglang            /generate with return_logprob and top_logprobs_num
  tgi               /generate with decoder_input_details: only the log-probability of the text
  llama-server      /completion with n_probs: the next token only
  any other         /v1/completions with logprobs: the next token only

`score_text` reads every position of a text in one request. `next_token` reads one position, which
every server with log-probabilities can do. A distribution holds the likeliest tokens only; what
they leave is one bucket, so a KL divergence of two of them is a lower bound of the true one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from ridgeline.errors import CannotRun
from ridgeline.optimize.external.server_deployment import TOP_LOGPROBS, post_blocking

Distribution = dict[str, float]
"""Token → log-probability, of the likeliest tokens."""
OPENAI_LOGPROBS = 5  # the limit of OpenAI's completions
SMALLEST = 1e-9


class ScoredToken(msgspec.Struct, frozen=True, kw_only=True):
    """One position of a text: its token, the log-probability, and the likeliest tokens there."""

    token: str
    logprob: float
    top: Distribution


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

    def next_token(self, text: str) -> Distribution:
        """The likeliest tokens after a text. Raises CannotRun if the server returns none."""
        return (_NEXT.get(self.kind) or _next_openai)(self, text)

    def answer(self, text: str, max_tokens: int) -> tuple[list[str], list[float]]:
        """The greedy continuation: token texts, and nats between the best two tokens of each."""
        if self.kind == "tgi":
            parameters = {"max_new_tokens": max_tokens, "details": True, "top_n_tokens": 2}
            details = self.post("/generate", {"inputs": text, "parameters": parameters})["details"]
            tops = [[row["logprob"] for row in rows] for rows in details.get("top_tokens") or ()]
            return [row["text"] for row in details["tokens"]], [_gap(top) for top in tops]
        if self.kind == "llama-server":
            body = {"prompt": text, "n_predict": max_tokens, "temperature": 0.0, "n_probs": 2}
            rows = self.post("/completion", {**body, "cache_prompt": False}).get(
                "completion_probabilities", []
            )
            texts = [str(row.get("token", row.get("content", ""))) for row in rows]
            return texts, [_gap(list(_llama_top(row).values())) for row in rows]
        return self._answer_openai(text, max_tokens)

    def _answer_openai(self, text: str, max_tokens: int) -> tuple[list[str], list[float]]:
        logprobs = self._complete(text, max_tokens, 2).get("logprobs") or {}
        tops = [list((top or {}).values()) for top in logprobs.get("top_logprobs") or ()]
        if not logprobs.get("tokens"):
            raise CannotRun("this server returns no tokens with its answer", value=self.url)
        return list(logprobs["tokens"]), [_gap(top) for top in tops]

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


# ---- the next token ----------------------------------------------------------------------------


def _next_openai(server: ServerScorer, text: str) -> Distribution:
    top = (server._complete(text, 1, OPENAI_LOGPROBS).get("logprobs") or {}).get("top_logprobs")
    return _some(dict((top or [{}])[0] or {}), server)


def _next_sglang(server: ServerScorer, text: str) -> Distribution:
    rows = _sglang(server, text, start=-1).get("output_top_logprobs") or [[]]
    return _some(_sglang_top(rows[0]), server)


def _next_tgi(server: ServerScorer, text: str) -> Distribution:
    parameters = {"max_new_tokens": 1, "details": True, "top_n_tokens": OPENAI_LOGPROBS}
    details = server.post("/generate", {"inputs": text, "parameters": parameters})["details"]
    rows = (details.get("top_tokens") or [[]])[0]
    return _some({str(row["id"]): row["logprob"] for row in rows}, server)


def _next_llama(server: ServerScorer, text: str) -> Distribution:
    body = {"prompt": text, "n_predict": 1, "n_probs": TOP_LOGPROBS, "temperature": 0.0}
    answer = server.post("/completion", {**body, "cache_prompt": False})
    return _some(_llama_top((answer.get("completion_probabilities") or [{}])[0]), server)


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


def _some(top: Distribution, server: ServerScorer) -> Distribution:
    if not top:
        raise CannotRun("this server returns no log-probabilities", value=server.url)
    return top


Score = Callable[[ServerScorer, str], list[ScoredToken]]
Next = Callable[[ServerScorer, str], Distribution]
_SCORES: Mapping[str, Score] = MappingProxyType(
    {"vllm": _score_vllm, "ridgeline": _score_vllm, "sglang": _score_sglang, "tgi": _score_tgi}
)
_NEXT: Mapping[str, Next] = MappingProxyType(
    {"sglang": _next_sglang, "tgi": _next_tgi, "llama-server": _next_llama}
)


# ---- comparing ---------------------------------------------------------------------------------


def truncated_kl(before: Distribution, after: Distribution) -> float:
    """KL(before || after) in nats over the tokens that both name and one bucket for the rest.

    A lower bound of the divergence of the whole distributions.
    """
    shared = before.keys() & after.keys()
    pairs = [(math.exp(before[token]), math.exp(after[token])) for token in shared]
    rest = tuple(max(SMALLEST, 1.0 - sum(column)) for column in zip(*pairs, strict=True))
    pairs.append((rest[0], rest[1]) if rest else (1.0, 1.0))
    if not shared:  # nothing in common: the likeliest tokens of one are in the rest of the other
        named = min(1.0, sum(math.exp(value) for value in before.values()))
        other = max(SMALLEST, 1.0 - sum(math.exp(value) for value in after.values()))
        pairs = [(named, other), (max(SMALLEST, 1 - named), max(SMALLEST, 1 - other))]
    total = sum(p * math.log(p / max(q, SMALLEST)) for p, q in pairs if p > 0)
    return max(0.0, total)


def best_token(top: Distribution) -> str:
    """The likeliest token."""
    return max(top, key=lambda token: top[token])


def _gap(logprobs: Sequence[float]) -> float:
    """Nats between the best two; infinite with fewer than two."""
    best = sorted(logprobs, reverse=True)[:2]
    return best[0] - best[1] if len(best) == 2 else math.inf
