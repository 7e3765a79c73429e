"""Queue limits: which requests may wait, and when the others should retry.

    refuse   The queue already holds `max_requests` requests or `max_tokens` prompt tokens, or (with
             the throttle) as many requests of one SLO are in flight as its limit allows.
             An account (an API key) may hold three times as many as are still free, so that one
             that floods the queue leaves a quarter of it to others (dynamic thresholds, Choudhury
             and Hahne 1998).
    admit    Every other request. `note_started` takes it out of the queue, `remove` out of all
             counts.

A full queue refuses at once: a request whose answer arrives too late costs the same work and helps
no one. The retry time is computed: queued tokens divided by the rate at which
queued tokens were started recently.

Throttle (off by default): for each SLO, a limit on the requests in flight that follows the p95 of
the latencies delivered, as TCP's congestion window follows packet loss (additive increase,
multiplicative decrease; Chiu and Jain 1989). A window of `WINDOW` finished requests whose p95 TTFT
or TPOT violates the SLO reduces the number in flight by a quarter; a window within the SLO adds
one.

When it loses: with few, long requests a window takes minutes, and the limit lags behind the load.

Invariants: a refusal changes nothing; every admitted request is counted once until `remove`;
without limits every request is admitted. No clock: instants are arguments, in seconds.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

import msgspec

from ridgeline.errors import EngineFull
from ridgeline.records import Event, Slo, Started, Token

WINDOW = 32
_RATE_WINDOW = 64  # recent starts from which the queue's rate is computed
_SERVICE_WINDOW = 16  # recent first tokens from which the time to serve a request is averaged
_MAX_RETRY_S = 60.0
_PART = 3  # times the free places, which one account may hold


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the queue; None is unlimited.

    `max_tokens` counts the prompt tokens of requests that have not started.
    """

    max_requests: int | None = None
    max_tokens: int | None = None
    throttle: bool = False


@dataclass(slots=True)
class _TrackedRequest:
    num_tokens: int
    slo: Slo | None
    admitted_s: float
    account: str = ""
    queued: bool = True
    started_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_output: int = 0


@dataclass(slots=True)
class _SloWindow:
    """Latencies delivered recently under one SLO, and the limit on its requests (None: none)."""

    in_flight: int = 0
    max_in_flight: int = 0
    limit: int | None = None
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)


class QueueLimiter:
    """Counts queued and running requests and refuses those beyond the limits."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.num_queued = self.num_queued_tokens = 0
        self.refused: dict[str, int] = dict.fromkeys(("requests", "tokens", "slo", "account"), 0)
        self._queued_of: Counter[str] = Counter()  # requests by account
        self._queued_tokens_of: Counter[str] = Counter()
        self._requests: dict[str, _TrackedRequest] = {}
        self._windows: dict[Slo, _SloWindow] = {}
        self._queued: dict[str, float] = {}  # admission times, oldest first
        self._starts: deque[tuple[float, int]] = deque(maxlen=_RATE_WINDOW)
        self._service_s: deque[float] = deque(maxlen=_SERVICE_WINDOW)  # start to first token

    def admit(
        self, request_id: str, num_tokens: int, slo: Slo | None, now_s: float, account: str = ""
    ) -> None:
        """Count a request with a prompt of `num_tokens` as queued, or raise EngineFull."""
        reason = self._refusal(num_tokens, slo, account)
        if reason is not None:
            self.refused[reason] += 1
            raise EngineFull(
                _MESSAGES[reason], reason=reason, retry_after_s=self.retry_after_s(now_s)
            )
        self._requests[request_id] = _TrackedRequest(num_tokens, slo, now_s, account)
        self._queued_of[account] += 1
        self._queued_tokens_of[account] += num_tokens
        self._queued[request_id] = now_s
        self.num_queued += 1
        self.num_queued_tokens += num_tokens
        if slo is not None:
            window = self._windows.setdefault(slo, _SloWindow())
            window.in_flight += 1
            window.max_in_flight = max(window.max_in_flight, window.in_flight)

    def observe(self, event: Event) -> None:
        """Follow a request by its events. The caller calls `remove` once the last choice ends."""
        if isinstance(event, Started):
            self.note_started(event.request_id, event.at_s)
        elif isinstance(event, Token):
            self.note_token(event.request_id, event.at_s)

    def note_started(self, request_id: str, now_s: float) -> None:
        """The request got its first slot."""
        request = self._requests.get(request_id)
        if request is not None and request.queued:
            self._starts.append((now_s, request.num_tokens))
            request.started_s = now_s
            self._dequeue(request_id, request)

    def note_token(self, request_id: str, now_s: float) -> None:
        """The request produced an output token."""
        request = self._requests.get(request_id)
        if request is None or request.queued:  # queued: tokens that it was resumed with
            return
        if request.first_token_s is None:
            request.first_token_s = now_s
            self._service_s.append(now_s - request.started_s)
        request.last_token_s = now_s
        request.num_output += 1

    def remove(self, request_id: str) -> None:
        """The request ended, for whatever reason; unknown ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if request.queued:
            self._dequeue(request_id, request)
        if request.slo is not None:
            self._record_latencies(request, request.slo)

    def retry_after_s(self, now_s: float) -> float:
        """Seconds until the requests waiting now will have started, at the recent rate."""
        if len(self._starts) < 2 or not self.num_queued_tokens:
            return 1.0
        tokens = sum(num_tokens for _, num_tokens in self._starts)
        rate = tokens / max(now_s - self._starts[0][0], 1e-3)
        return min(max(self.num_queued_tokens / max(rate, 1e-9), 1.0), _MAX_RETRY_S)

    def age_s(self, now_s: float) -> float:
        """How long the oldest queued request has waited; 0 for an empty queue."""
        oldest_s = next(iter(self._queued.values()), now_s)
        return max(0.0, now_s - oldest_s)

    def predict_ttft_s(self, now_s: float) -> float:
        """Time to first token of a request that arrived now.

        The wait is what the oldest request has waited already, or longer if the queue takes longer
        to empty at the recent rate; then comes the mean time from start to first token.
        """
        service_s = sum(self._service_s) / len(self._service_s) if self._service_s else 0.0
        if not self.num_queued:
            return service_s
        empties_s = self.retry_after_s(now_s) if len(self._starts) >= 2 else 0.0
        return max(self.age_s(now_s), empties_s) + service_s

    def as_dict(self) -> dict[str, float]:
        """Queue levels and refusal counts, for the engine's counters."""
        levels = {"num_queued": self.num_queued, "num_queued_tokens": self.num_queued_tokens}
        return {name: float(value) for name, value in levels.items()} | {
            f"refused_{reason}": float(count) for reason, count in self.refused.items()
        }

    def slo_limit(self, slo: Slo) -> int | None:
        """How many requests with this SLO may be in flight; None for any number."""
        window = self._windows.get(slo)
        return None if window is None else window.limit

    def _refusal(self, num_tokens: int, slo: Slo | None, account: str) -> str | None:
        limits = self.limits
        if limits.max_requests is not None and self.num_queued >= limits.max_requests:
            return "requests"
        over = limits.max_tokens is not None and (
            self.num_queued_tokens + num_tokens > limits.max_tokens
        )
        if over and self.num_queued:  # on its own, a request may be larger than the whole queue
            return "tokens"
        if account and self._queued_of[account] and self._exceeds_part(num_tokens, account):
            return "account"
        window = self._windows.get(slo) if limits.throttle and slo is not None else None
        full = window is not None and window.limit is not None and window.in_flight >= window.limit
        return "slo" if full else None

    def _exceeds_part(self, num_tokens: int, account: str) -> bool:
        """Whether one more request of an account would leave too little room for others."""
        limits = self.limits
        if limits.max_requests is not None:
            free = limits.max_requests - self.num_queued
            if self._queued_of[account] >= _PART * free:
                return True
        if limits.max_tokens is None:
            return False
        free = limits.max_tokens - self.num_queued_tokens
        return self._queued_tokens_of[account] + num_tokens > _PART * free

    def _dequeue(self, request_id: str, request: _TrackedRequest) -> None:
        request.queued = False
        del self._queued[request_id]
        self.num_queued -= 1
        self.num_queued_tokens -= request.num_tokens
        account = request.account
        self._queued_of[account] -= 1
        self._queued_tokens_of[account] -= request.num_tokens
        if not self._queued_of[account]:
            del self._queued_of[account], self._queued_tokens_of[account]

    def _record_latencies(self, request: _TrackedRequest, slo: Slo) -> None:
        window = self._windows[slo]
        window.in_flight -= 1
        if not self.limits.throttle or request.first_token_s is None:
            return
        window.ttft_s.append(request.first_token_s - request.admitted_s)
        if request.num_output > 1:
            decode_s = request.last_token_s - request.first_token_s
            window.tpot_s.append(decode_s / (request.num_output - 1))
        if len(window.ttft_s) >= WINDOW:
            _close_window(window, slo)


def _close_window(window: _SloWindow, slo: Slo) -> None:
    """Lower the limit if the window violated the SLO, raise it otherwise; start a new window."""
    violated = _p95(window.ttft_s) > (slo.ttft_s or math.inf) or (
        bool(window.tpot_s) and _p95(window.tpot_s) > (slo.tpot_s or math.inf)
    )
    if violated:
        base = window.max_in_flight if window.limit is None else window.limit
        window.limit = max(1, base * 3 // 4)
    elif window.limit is not None:
        window.limit += 1
    window.max_in_flight = window.in_flight
    window.ttft_s.clear()
    window.tpot_s.clear()


def _p95(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


_MESSAGES = {
    "requests": "the queue is full: it holds as many requests as --max-num-queued-reqs allows",
    "tokens": "the queue is full: it holds as many tokens as --max-num-queued-tokens allows",
    "account": "the queue is full for this API key: the rest is kept for the requests of others",
    "slo": "new requests of this SLO class are held back so that running ones meet the SLO",
}
