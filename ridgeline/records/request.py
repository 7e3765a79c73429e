"""A request and its sampling parameters, validated once, on construction."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from ridgeline.errors import BadInput
from ridgeline.records.kv_eviction import KvEviction
from ridgeline.records.kv_transfer import KvTransferParams
from ridgeline.records.slo import Slo
from ridgeline.records.thinking import ThinkingLimit, ThinkingMarks

MAX_LOGPROBS = 20  # OpenAI's and vLLM's default ceiling for top_logprobs
MAX_N = 128
# Bounds of repetition_penalty: logits divided or multiplied by them stay finite in float32.
MIN_PENALTY, MAX_PENALTY = 1e-20, 1e20


class OutputGrammar(msgspec.Struct, frozen=True):
    """The form that the whole output must have.

    `text` is a JSON schema ("json", "call"), a regular expression, a JSON list of strings
    ("choice") or a Lark grammar. The output of a "call" is read by a program and is written on one
    line. "answer_or_calls" is a Lark grammar in which `%json SCHEMA` and `%call SCHEMA` stand for
    such outputs, for tools next to an answer and for thinking before it.
    """

    kind: Literal["json", "call", "regex", "choice", "grammar", "answer_or_calls"]
    text: str


class BeamSearch(msgspec.Struct, frozen=True):
    """Beam search with as many beams as the request has choices.

    A finished output's score is the sum of its log-probabilities over its length to the power of
    `length_penalty`. `early_stopping`: True ends the search once every choice is finished, False
    when no beam beats them as it stands, "never" when none could at the greatest length.
    """

    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if not -10.0 <= self.length_penalty <= 10.0:
            raise _out_of_range("length_penalty", self.length_penalty, "[-10.0, 10.0]")


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters. Field names and defaults are those of vLLM's SamplingParams.

    `top_k` 0 or -1: off. `seed` None: the engine draws one at admission. `logprobs` k returns the
    log-probability of the chosen token and the k largest, from the raw log-softmax before
    temperature and penalties. `max_tokens` None: up to the end of the context. `structured` and
    `allowed_token_ids` mask the other tokens first, so that log-probabilities are those of the
    remaining tokens (as in vLLM). With `logprobs`, `logprob_token_ids` names the tokens whose
    log-probabilities are returned in place of the largest. A `stop` string that is a special token
    stops at that token; one that contains special tokens as well as other text is compared with the
    text before they are skipped. `shown_special_tokens`: special tokens that stay in the text
    although `skip_special_tokens`. The output never contains one of `bad_words`. After
    `thinking_token_budget` tokens of thinking, which `thinking_marks` enclose, the output continues
    with the forced end of the thinking. With `beam` the choices are the best outputs of a beam
    search, which reads raw log-probabilities only; `logprobs` are those of each output. The engine
    fills in `bad_words_token_ids` and `thinking_limit` with the tokens of its model. `kv_eviction`:
    which keys and values stay in the cache; None: as the engine is configured.
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
    shown_special_tokens: tuple[str, ...] = ()
    structured: OutputGrammar | None = None
    allowed_token_ids: tuple[int, ...] = ()
    logprob_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    thinking_token_budget: int | None = None
    thinking_marks: ThinkingMarks = ThinkingMarks()
    thinking_limit: ThinkingLimit | None = None
    kv_eviction: KvEviction | None = None
    beam: BeamSearch | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise _out_of_range("temperature", self.temperature, "[0.0, inf)")
        if not 0.0 < self.top_p <= 1.0:
            raise _out_of_range("top_p", self.top_p, "(0.0, 1.0]")
        if not 0.0 <= self.min_p <= 1.0:
            raise _out_of_range("min_p", self.min_p, "[0.0, 1.0]")
        if not MIN_PENALTY <= self.repetition_penalty <= MAX_PENALTY:
            limit = f"[{MIN_PENALTY:g}, {MAX_PENALTY:g}]"
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
        self._check_token_rules()
        if self.beam is not None:
            self._check_beam_search()
        elif self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise _out_of_range("logprobs", self.logprobs, f"[0, {MAX_LOGPROBS}]")
        if self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= MAX_LOGPROBS:
            raise _out_of_range("prompt_logprobs", self.prompt_logprobs, f"[0, {MAX_LOGPROBS}]")
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise _out_of_range(f"logit_bias[{token}]", bias, "[-100.0, 100.0]")
        if any(not text for text in self.stop):
            raise BadInput(
                "a stop string is empty, which would stop every output at once",
                fix="remove the empty string",
            )
        if self.structured is not None and self.allowed_token_ids:
            raise BadInput(
                "structured output cannot be combined with allowed_token_ids, which may leave no "
                "token that the grammar accepts",
                fix="send either structured output or allowed_token_ids",
            )
        if self.structured is not None and (self.ignore_eos or self.min_tokens):
            raise BadInput(
                "structured output cannot be combined with ignore_eos or min_tokens: it ends where "
                "its grammar ends",
                fix="remove ignore_eos and min_tokens",
            )

    def _check_token_rules(self) -> None:
        if any(not word.strip() for word in self.bad_words):
            message = "a bad word is empty or only white space"
            raise BadInput(message, fix="remove it from bad_words")
        budget = self.thinking_token_budget
        if budget is None:
            return
        if not 0 <= budget < math.inf:
            raise _out_of_range("thinking_token_budget", budget, "[0, inf)")
        if self.structured is not None or self.allowed_token_ids:
            raise BadInput(
                "thinking_token_budget cannot be combined with structured output or "
                "allowed_token_ids, which may forbid the tokens that end the thinking",
                fix="send only one of them",
            )

    def _check_beam_search(self) -> None:
        """Beam search ranks raw log-probabilities: what changes them or the draw has no place."""
        others = {
            "temperature": not self.greedy,
            "penalties": self.has_penalties,
            "logit_bias": self.logit_bias,
            "structured output": self.structured is not None,
            "allowed_token_ids": self.allowed_token_ids,
            "bad_words": self.bad_words,
            "thinking_token_budget": self.thinking_token_budget is not None,
            "min_tokens": self.min_tokens,
            "stop": self.stop,
            "prompt_logprobs": self.prompt_logprobs is not None,
            "logprob_token_ids": self.logprob_token_ids,
            "kv_eviction": self.kv_eviction is not None,
        }
        named = [name for name, is_set in others.items() if is_set]
        if named:
            raise BadInput(
                f"beam search cannot be combined with {named[0]}", fix=f"leave {named[0]} out"
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
    def is_plain_greedy(self) -> bool:
        """True if the token is the first largest logit and the logits are used for nothing else.

        `min_tokens`, which bans the end of sequence for a while, is allowed.
        """
        needs_more = self.logprobs is not None or self.logit_bias or self.has_penalties
        needs_more = needs_more or self.has_token_rules or self.beam is not None
        return self.greedy and not (needs_more or self.is_masked)

    @property
    def is_masked(self) -> bool:
        """True if some tokens are excluded whatever their logits."""
        return self.structured is not None or bool(self.allowed_token_ids)

    @property
    def has_history(self) -> bool:
        """True if choosing a token depends on the tokens before it."""
        needs_output = self.thinking_limit is not None or any(
            len(word) > 1 for word in self.bad_words_token_ids
        )
        return self.has_penalties or self.structured is not None or needs_output

    @property
    def has_token_rules(self) -> bool:
        """True if the output so far may forbid or force tokens."""
        return bool(self.bad_words_token_ids) or self.thinking_limit is not None

    @property
    def has_penalties(self) -> bool:
        """True if logits are adjusted by the tokens generated so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of requests that leave them out; None: that of `Sampling`.

    Raises BadInput for values out of range, as `Sampling` does. `max_tokens` applies where a
    request may otherwise fill the context.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        self.fill(max_tokens=self.max_tokens)

    def __str__(self) -> str:
        """As "temperature 0.6, top_p 0.95"; "none" without any."""
        named = msgspec.to_builtins(self)
        return ", ".join(f"{name} {value:g}" for name, value in named.items()) or "none"

    def fill(self, **given: Any) -> Sampling:
        """The sampling of a request that names only `given`; `max_tokens` is not filled in."""
        named = {**msgspec.structs.asdict(self), "max_tokens": None}
        return Sampling(**{k: v for k, v in named.items() if v is not None} | given)


def _out_of_range(name: str, value: float, limit: str) -> BadInput:
    return BadInput(
        f"{name} is out of range", value=value, limit=limit, fix=f"send a {name} within the limit"
    )


class CachePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What the prefix cache keeps of a request.

    The first `pin_tokens` of the prompt are evicted last for `pin_ttl_s` seconds. At most
    `max_cached_tokens` of the sequence can be found by later requests; None: all of it.
    """

    pin_tokens: int = 0
    pin_ttl_s: float = 300.0
    max_cached_tokens: int | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the engine accepts it: token ids, sampling parameters, scheduling parameters.

    Lower `priority` goes first (vLLM's convention); among equal priorities, the request whose first
    token is due first under its `slo`. `tenant` salts the prefix cache: tenants never share blocks.
    `arrival_s` is on the engine's clock. A `background` request (a batch request) yields its slot
    and its blocks to any other request, whatever the priorities; clients cannot set it. Waiting
    `account`s are served in proportion to their `share`s. `prediction` is what the client expects
    as output: drafts come from it, and no token changes. `adapter` is the id of a loaded adapter; 0
    is the base model. `cache` None keeps all of it in the prefix cache, unpinned.

    `resumed` holds the tokens that another engine has generated already, per choice: they are
    reported again, as they were, and generation continues behind them. With the same `seed` the
    whole output is that of a request which was never interrupted. Missing choices have no tokens.

    `kv_source` names the server that has computed the prompt; `lease` the one under which the
    blocks of this prompt are kept for another server.
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
    resumed: tuple[tuple[int, ...], ...] = ()
    account: str = ""
    share: float = 1.0
    prediction: tuple[int, ...] = ()
    adapter: int = 0
    cache: CachePolicy | None = None
    kv_source: KvTransferParams | None = None
    lease: str = ""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise BadInput("the prompt is empty", fix="send at least one token of text")
        if len(self.resumed) > self.sampling.n:
            raise BadInput(
                "there are resumed tokens of more choices than the request has",
                value=len(self.resumed),
                limit=self.sampling.n,
            )

    @property
    def cache_scope(self) -> str:
        """What requests must have in common to share computed prefixes: tenant and adapter."""
        return f"{self.tenant}\0adapter {self.adapter}" if self.adapter else self.tenant

    def resumed_tokens(self, index: int) -> tuple[int, ...]:
        """The resumed tokens of choice `index`."""
        return self.resumed[index] if index < len(self.resumed) else ()


def as_dict(record: msgspec.Struct) -> dict[str, Any]:
    """The record as dicts, lists and plain values, for JSON and TOML."""
    return dict(msgspec.to_builtins(record))
