"""Events of a request, in order. Times are seconds on the engine's clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort"]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one request. `cached_tokens` of the prompt came from the prefix cache.

    `accepted_prediction_tokens` of the output were in the request's prediction;
    `rejected_prediction_tokens` were drafted from it in vain. Both are None without a prediction.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


def prediction_totals(usages: Sequence[Usage]) -> dict[str, int | None]:
    """The prediction counts of several choices together, as fields of a `Usage`."""
    names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
    counts = {name: [getattr(usage, name) for usage in usages] for name in names}
    return {name: None if None in own or not own else sum(own) for name, own in counts.items()}


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Raw log-softmax at one position: the chosen token, its rank (1: likeliest), the top k."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The request is part of a step for the first time: the end of its queue time.

    `pinned_tokens` of the prompt are pinned in the prefix cache, as the request asked.
    """

    request_id: str
    at_s: float
    cached_tokens: int
    pinned_tokens: int = 0


class Token(msgspec.Struct, frozen=True, kw_only=True, tag="token"):
    """One output token of choice `index`.

    `text` is the text that this token completes. It may be empty: half a UTF-8 character, or text
    held back because it may be the start of a stop string. `prompt_logprobs` comes with the first
    token only; its first entry is None, because nothing predicts the first token of a prompt.
    """

    request_id: str
    index: int
    token: int
    text: str
    at_s: float
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class Preempted(msgspec.Struct, frozen=True, kw_only=True, tag="preempted"):
    """The sequence lost its blocks and will be recomputed. Tokens already sent stay valid."""

    request_id: str
    index: int
    at_s: float


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """Choice `index` ended.

    `text` was held back until now; `stop_reason` is the string or token.
    """

    request_id: str
    index: int
    reason: FinishReason
    at_s: float
    usage: Usage
    text: str = ""
    stop_reason: str | int | None = None


FailureCause = Literal["error", "deadline", "request", "engine"]


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The request failed; no further event follows.

    `cause` "deadline": its deadline passed. "request": the request itself cannot be served, and
    retrying will not help. "engine": the engine has stopped, and another one can serve it.
    """

    request_id: str
    at_s: float
    error: str
    cause: FailureCause = "error"


Event = Started | Token | Preempted | Finished | Failed
