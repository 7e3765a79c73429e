"""What the engine says happened, in order, per request. Instants are seconds on the engine's clock."""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort"]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one request; `cached_tokens`: the part of the prompt from the prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Raw log-softmax of one position: the chosen token's, its rank (1: likeliest), the top k."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The scheduler gave the request its first share of a step: the end of its queue time."""

    request_id: str
    at_s: float
    cached_tokens: int


class Token(msgspec.Struct, frozen=True, kw_only=True, tag="token"):
    """One output token of choice `index`.

    `text` is what became certain with it: it may be empty (half a UTF-8 character, or text held
    back because it may be the start of a stop string). `prompt_logprobs` comes with the first token
    only; its first entry is None (nothing predicts the first token of a prompt).
    """

    request_id: str
    index: int
    token: int
    text: str
    at_s: float
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class Preempted(msgspec.Struct, frozen=True, kw_only=True, tag="preempted"):
    """The sequence lost its blocks and will be recomputed. No token that was sent is taken back."""

    request_id: str
    index: int
    at_s: float


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """Choice `index` ended. `text` was held back until now; `stop_reason`: the string or token."""

    request_id: str
    index: int
    reason: FinishReason
    at_s: float
    usage: Usage
    text: str = ""
    stop_reason: str | int | None = None


FailureCause = Literal["error", "deadline", "request"]


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The engine could not serve the request; nothing further follows for it.

    `cause` "deadline": it was given up because nobody wants the answer any more; "request": what it
    asks for cannot be done, and asking again will not help.
    """

    request_id: str
    at_s: float
    error: str
    cause: FailureCause = "error"


Event = Started | Token | Preempted | Finished | Failed
