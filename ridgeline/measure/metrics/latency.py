"""Latencies of requests, and their distributions.

Pure functions in seconds; docs/concepts/measurements.md defines them. None means "undefined for
this request" and is never part of an average. Latencies count from the *scheduled* arrival unless
`base` is "sent".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Literal

import msgspec

from ridgeline.records import RequestTrace, RunTrace
from ridgeline.records.trace import CANCELLED, TIMEOUT
from ridgeline.stats import percentile

Base = Literal["scheduled", "sent"]
RequestOutcome = Literal["ok", "failed", "cancelled", "timeout"]

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
LENGTH_BUCKETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def outcome(request: RequestTrace) -> RequestOutcome:
    """How a request ended. A request without an end has failed."""
    error = request.error or ""
    if error.startswith(TIMEOUT):
        return "timeout"
    if error.startswith(CANCELLED) or request.finish_reason == "abort":
        return "cancelled"
    return "failed" if request.error is not None or request.finished_s is None else "ok"


def successful_requests(requests: Iterable[RequestTrace]) -> list[RequestTrace]:
    return [request for request in requests if outcome(request) == "ok"]


def begin_s(request: RequestTrace, base: Base = "scheduled") -> float:
    return request.scheduled_s if base == "scheduled" else request.sent_s


def ttft_s(request: RequestTrace, base: Base = "scheduled") -> float | None:
    """Time to the first chunk with output (not a role or an empty chunk)."""
    return request.token_s[0] - begin_s(request, base) if request.token_s else None


def e2e_s(request: RequestTrace, base: Base = "scheduled") -> float | None:
    """Time to the last output token, not to a later usage chunk; to the end without tokens."""
    end_s = request.token_s[-1] if request.token_s else request.finished_s
    return None if end_s is None else end_s - begin_s(request, base)


def tpot_s(request: RequestTrace) -> float | None:
    """Mean time per output token after the first chunk.

    None without such tokens (one token, or all at once): nothing was observed, and a 0 would meet
    any limit.
    """
    tokens_after = sum(request.token_counts[1:])
    if tokens_after < 1:
        return None
    return (request.token_s[-1] - request.token_s[0]) / tokens_after


def tpot_incl_first_s(request: RequestTrace) -> float | None:
    """GuideLLM's TPOT: time from send over *all* output tokens. For comparison only."""
    total_s = e2e_s(request, "sent")
    return (
        total_s / request.output_tokens if total_s is not None and request.output_tokens else None
    )


def itl_chunk_s(request: RequestTrace) -> list[float]:
    """Gaps between chunks with output, as a reader sees them."""
    return [after - before for before, after in pairwise(request.token_s)]


def itl_s(request: RequestTrace) -> list[float]:
    """Inter-token latency of every token after the first chunk: k tokens in a chunk share its gap.

    With one token per chunk this is `itl_chunk_s`.
    """
    return [
        gap / count
        for gap, count in zip(itl_chunk_s(request), request.token_counts[1:], strict=True)
        for _ in range(count)
    ]


def queue_s(request: RequestTrace) -> float | None:
    """From the send until the server first ran the request; None if it does not report that."""
    return None if request.started_s is None else request.started_s - request.sent_s


def publish_s(request: RequestTrace) -> float | None:
    """From the step that computed the first token until the client received it; None if unknown."""
    if request.first_computed_s is None or not request.token_s:
        return None
    return request.token_s[0] - request.first_computed_s


def client_queue_s(request: RequestTrace) -> float:
    """From the scheduled arrival until the send: waiting for a slot of the client, and its lag."""
    return request.sent_s - request.scheduled_s


def visible_s(request: RequestTrace) -> float | None:
    """From the scheduled arrival to the first token that is not reasoning."""
    if not request.reasoned:
        return ttft_s(request)
    return None if request.visible_s is None else request.visible_s - request.scheduled_s


def user_tok_s(request: RequestTrace) -> float | None:
    """Output tokens per second that one user sees, without the first token: 1 / TPOT."""
    per_token_s = tpot_s(request)
    return 1 / per_token_s if per_token_s else None


def fluidity(request: RequestTrace, first_s: float, next_s: float) -> float | None:
    """Share of tokens that met their deadline (etalon's fluidity index, arXiv 2407.07000).

    The first token is due `first_s` after arrival, each later one `next_s` after its predecessor;
    time saved on early tokens is slack for later ones, and a missed deadline resets the slack.
    """
    met = total = 0
    slack_s, before_s, limit_s = 0.0, request.scheduled_s, first_s
    for at_s, count in zip(request.token_s, request.token_counts, strict=True):
        for took_s in [at_s - before_s, *[0.0] * (count - 1)]:
            in_time = took_s <= limit_s + slack_s
            slack_s = slack_s + limit_s - took_s if in_time else 0.0
            met, total, limit_s = met + in_time, total + 1, next_s
        before_s = at_s
    return met / total if total else None


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Sorted values of many requests or tokens."""

    values: tuple[float, ...]

    @property
    def count(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    @property
    def std(self) -> float:
        """Population standard deviation, as numpy's and vLLM's."""
        return statistics.pstdev(self.values)

    @property
    def max(self) -> float:
        return self.values[-1]

    def p(self, q: float) -> float:
        return percentile(self.values, q)

    def with_failures(self, num_failed: int) -> Distribution:
        """With failures as infinite values, so that no percentile improves by failing."""
        return Distribution(values=(*self.values, *[math.inf] * num_failed))


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """The distribution of the defined values; None if there are none."""
    defined = sorted(value for value in values if value is not None)
    return Distribution(values=tuple(defined)) if defined else None


def pool_values(
    requests: Iterable[RequestTrace], per_request: Callable[[RequestTrace], list[float]]
) -> Distribution | None:
    """All values of all requests: weighted by tokens, so that long answers count more."""
    return distribution(value for request in requests for value in per_request(request))


def split(run: RunTrace, key: Callable[[RequestTrace], str]) -> dict[str, RunTrace]:
    """The run once per group of requests, without its steps."""
    groups: dict[str, list[RequestTrace]] = {}
    for request in run.requests:
        groups.setdefault(key(request), []).append(request)
    return {
        name: msgspec.structs.replace(run, requests=tuple(requests), steps=())
        for name, requests in sorted(groups.items())
    }


def by_kind(request: RequestTrace) -> str:
    return request.kind


def by_input_length(request: RequestTrace) -> str:
    """Bucket of prompt tokens, with names that sort: `input<=000256`."""
    for limit in LENGTH_BUCKETS:
        if request.prompt_tokens <= limit:
            return f"input<={limit:06d}"
    return f"input>{LENGTH_BUCKETS[-1]:06d}"
