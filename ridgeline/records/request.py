"""What the user sent: an `Request` and its `Sampling` parameters, validated once, here."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from ridgeline.errors import BadInput
from ridgeline.records.slo import Slo

MAX_LOGPROBS = 20  # OpenAI's and vLLM's default ceiling for top_logprobs
MAX_N = 128
# Of repetition: logits divided or multiplied by them stay finite in float32.
LEAST_PENALTY, MOST_PENALTY = 1e-20, 1e20


class Structured(msgspec.Struct, frozen=True):
    """What the whole answer must look like.

    `text` is a JSON schema, a regular expression, a JSON list of texts, or a Lark grammar. A `call`
    is a JSON schema whose answer a program reads: on one line.
    """

    kind: Literal["json", "call", "regex", "choice", "grammar"]
    text: str


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens. Field names and defaults are those of vLLM's SamplingParams.

    `top_k` 0 or -1 means off. `seed` None draws one from the engine's own generator at admission.
    `logprobs` k returns the chosen token's log-probability and the k largest, from the raw
    log-softmax before temperature and penalties. `max_tokens` None means "up to the context's end".
    `structured` and `allowed_token_ids` take the other tokens away before anything else looks, so
    that log-probabilities are those of the tokens left (as in vLLM).
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured: Structured | None = None
    allowed_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise _out_of_range("temperature", self.temperature, "[0.0, inf)")
        if not 0.0 < self.top_p <= 1.0:
            raise _out_of_range("top_p", self.top_p, "(0.0, 1.0]")
        if not 0.0 <= self.min_p <= 1.0:
            raise _out_of_range("min_p", self.min_p, "[0.0, 1.0]")
        if not LEAST_PENALTY <= self.repetition_penalty <= MOST_PENALTY:
            limit = f"[{LEAST_PENALTY:g}, {MOST_PENALTY:g}]"
            raise _out_of_range("repetition_penalty", self.repetition_penalty, limit)
        if not -2.0 <= self.presence_penalty <= 2.0:
            raise _out_of_range("presence_penalty", self.presence_penalty, "[-2.0, 2.0]")
        if not -2.0 <= self.frequency_penalty <= 2.0:
            raise _out_of_range("frequency_penalty", self.frequency_penalty, "[-2.0, 2.0]")
        if not 1 <= self.n <= MAX_N:
            raise _out_of_range("n", self.n, f"[1, {MAX_N}]")
        if not self.top_k >= -1:
            raise _out_of_range("top_k", self.top_k, "[-1, inf)")
        if not 0 <= self.min_tokens < math.inf:
            raise _out_of_range("min_tokens", self.min_tokens, "[0, inf)")
        self._check_max_tokens()
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise _out_of_range("logprobs", self.logprobs, f"[0, {MAX_LOGPROBS}]")
        if self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= MAX_LOGPROBS:
            raise _out_of_range("prompt_logprobs", self.prompt_logprobs, f"[0, {MAX_LOGPROBS}]")
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise _out_of_range(f"logit_bias[{token}]", bias, "[-100.0, 100.0]")
        if any(not text for text in self.stop):
            raise BadInput("an empty stop string would stop at once", fix="remove the empty string")
        if self.structured is not None and self.allowed_token_ids:
            raise BadInput(
                "a list of allowed tokens may leave a grammar without a way on",
                fix="send either structured output or allowed_token_ids",
            )
        if self.structured is not None and (self.ignore_eos or self.min_tokens):
            raise BadInput(
                "structured output ends where its grammar ends",
                fix="leave ignore_eos and min_tokens out",
            )

    def _check_max_tokens(self) -> None:
        if self.max_tokens is None:
            return
        if not 1 <= self.max_tokens < math.inf:
            raise _out_of_range("max_tokens", self.max_tokens, "[1, inf)")
        if self.min_tokens > self.max_tokens:
            raise BadInput(
                "min_tokens exceeds max_tokens",
                value=self.min_tokens,
                limit=self.max_tokens,
                fix="lower min_tokens",
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def takes_first_largest(self) -> bool:
        """True where the token is the first largest logit and nothing else is asked of the logits
        (but for tokens that are banned for a while: `min_tokens`)."""
        asks_more = self.logprobs is not None or self.logit_bias or self.has_penalties
        return self.greedy and not (asks_more or self.is_masked)

    @property
    def is_masked(self) -> bool:
        """True where some tokens may not come out, whatever their logits."""
        return self.structured is not None or bool(self.allowed_token_ids)

    @property
    def has_history(self) -> bool:
        """True where choosing a token needs those before it."""
        return self.has_penalties or self.structured is not None

    @property
    def has_penalties(self) -> bool:
        """True where logits change with the tokens so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _out_of_range(name: str, value: float, limit: str) -> BadInput:
    """No number (nan) is in any range: comparisons with it are false."""
    return BadInput(
        f"{name} is out of range", value=value, limit=limit, fix=f"send a {name} within the limit"
    )


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the engine accepts it: token ids, sampling, and what the service promised.

    Lower `priority` goes first (vLLM's convention). `tenant` salts the prefix cache: two tenants
    never share blocks. `arrival_s` is on the engine's clock. `slo`: what was promised; among requests
    of one priority, the one whose first token is due first goes first.
    A `background` request (a batch line) yields its seat and its blocks to any other, whatever the
    priorities; no client can ask for one.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    arrival_s: float
    priority: int = 0
    deadline_s: float | None = None
    tenant: str = ""
    slo: Slo | None = None
    background: bool = False

    def __post_init__(self) -> None:
        if not self.prompt:
            raise BadInput("the prompt is empty", fix="send at least one token of text")


def as_dict(record: msgspec.Struct) -> dict[str, Any]:
    """Plain builtins of a record, for JSON and TOML."""
    return dict(msgspec.to_builtins(record))
