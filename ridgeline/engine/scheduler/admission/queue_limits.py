"""The gate before the queue: who may wait, who is told to come back, and when.

    refuse   the queue holds `max_requests` requests or `max_tokens` prompt tokens already, or (with the
             throttle) as many requests of one promise are under way as its limit allows
    admit    everybody else; `started` takes a request out of the queue's count, `ended` out of all

A full queue refuses at once: a request that waits longer than anybody wants its answer costs the same
work and helps nobody. When to come back is computed, not guessed: the queue's tokens over the rate
at which queued tokens have lately been started.

Throttle (off unless asked for): per promise, a limit on requests under way that follows the p95 of
what was delivered, as TCP's window follows loss (additive increase, multiplicative decrease; Chiu
and Jain 1989). Each window of `WINDOW` finished requests whose p95 TTFT or TPOT breaks the promise
takes a quarter off the number that was under way; a window within it adds one.
When it loses: with few, long requests a window takes minutes, and the limit lags behind the load.

Invariants: a refusal changes nothing; every admitted request is counted once until `ended`; with no
limits the gate admits everybody. No clock: instants come in.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import msgspec

from ridgeline.errors import EngineFull
from ridgeline.records import Event, Slo, Started, Token

WINDOW = 32
_RECENT = 64  # starts from which the queue's pace is taken
_LONGEST_S = 60.0


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """None: no limit. `max_tokens` counts the prompts of requests that have not started."""

    max_requests: int | None = None
    max_tokens: int | None = None
    throttle: bool = False


@dataclass(slots=True)
class _Known:
    num_tokens: int
    slo: Slo | None
    admitted_s: float
    queued: bool = True
    first_s: float | None = None
    last_s: float = 0.0
    num_output: int = 0


@dataclass(slots=True)
class _Window:
    """What was delivered lately under one promise, and how many requests it lets in (None: all)."""

    under_way: int = 0
    most_under_way: int = 0
    limit: int | None = None
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)


class QueueLimiter:
    """See the head of this file."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.num_queued = self.num_queued_tokens = 0
        self.refused: dict[str, int] = dict.fromkeys(("requests", "tokens", "slo"), 0)
        self._known: dict[str, _Known] = {}
        self._windows: dict[Slo, _Window] = {}
        self._starts: deque[tuple[float, int]] = deque(maxlen=_RECENT)

    def admit(self, request_id: str, num_tokens: int, slo: Slo | None, now_s: float) -> None:
        """Count the request as waiting; EngineFull where it may not."""
        reason = self._refusal(num_tokens, slo)
        if reason is not None:
            self.refused[reason] += 1
            raise EngineFull(
                _MESSAGES[reason], reason=reason, retry_after_s=self.retry_after_s(now_s)
            )
        self._known[request_id] = _Known(num_tokens, slo, now_s)
        self.num_queued += 1
        self.num_queued_tokens += num_tokens
        if slo is not None:
            window = self._windows.setdefault(slo, _Window())
            window.under_way += 1
            window.most_under_way = max(window.most_under_way, window.under_way)

    def started(self, request_id: str, now_s: float) -> None:
        """The request has its first share of a step."""
        known = self._known.get(request_id)
        if known is not None and known.queued:
            self._starts.append((now_s, known.num_tokens))
            self._unqueue(known)

    def saw(self, event: Event) -> None:
        """Follow a request by its events. The last one of its choices is for the caller to notice."""
        if isinstance(event, Started):
            self.started(event.request_id, event.at_s)
        elif isinstance(event, Token):
            self.token(event.request_id, event.at_s)

    def token(self, request_id: str, now_s: float) -> None:
        """One output token of the request."""
        known = self._known.get(request_id)
        if known is None:
            return
        if known.first_s is None:
            known.first_s = now_s
        known.last_s = now_s
        known.num_output += 1

    def ended(self, request_id: str) -> None:
        """The request is over, one way or another; unknown ids are ignored."""
        known = self._known.pop(request_id, None)
        if known is None:
            return
        if known.queued:
            self._unqueue(known)
        if known.slo is not None:
            self._learn(known, known.slo)

    def retry_after_s(self, now_s: float) -> float:
        """Seconds until what waits now will have started, by the pace of the latest starts."""
        if len(self._starts) < 2 or not self.num_queued_tokens:
            return 1.0
        tokens = sum(num_tokens for _, num_tokens in self._starts)
        rate = tokens / max(now_s - self._starts[0][0], 1e-3)
        return min(max(self.num_queued_tokens / max(rate, 1e-9), 1.0), _LONGEST_S)

    def as_dict(self) -> dict[str, float]:
        """Levels and totals, for whoever watches."""
        levels = {"num_queued": self.num_queued, "num_queued_tokens": self.num_queued_tokens}
        return {name: float(value) for name, value in levels.items()} | {
            f"refused_{reason}": float(count) for reason, count in self.refused.items()
        }

    def limit_of(self, slo: Slo) -> int | None:
        """How many requests of this promise may be under way; None: as many as come."""
        window = self._windows.get(slo)
        return None if window is None else window.limit

    def _refusal(self, num_tokens: int, slo: Slo | None) -> str | None:
        limits = self.limits
        if limits.max_requests is not None and self.num_queued >= limits.max_requests:
            return "requests"
        over = limits.max_tokens is not None and (
            self.num_queued_tokens + num_tokens > limits.max_tokens
        )
        if over and self.num_queued:  # alone, a request may be larger than the whole queue
            return "tokens"
        window = self._windows.get(slo) if limits.throttle and slo is not None else None
        full = window is not None and window.limit is not None and window.under_way >= window.limit
        return "slo" if full else None

    def _unqueue(self, known: _Known) -> None:
        known.queued = False
        self.num_queued -= 1
        self.num_queued_tokens -= known.num_tokens

    def _learn(self, known: _Known, slo: Slo) -> None:
        window = self._windows[slo]
        window.under_way -= 1
        if not self.limits.throttle or known.first_s is None:
            return
        window.ttft_s.append(known.first_s - known.admitted_s)
        if known.num_output > 1:
            window.tpot_s.append((known.last_s - known.first_s) / (known.num_output - 1))
        if len(window.ttft_s) >= WINDOW:
            _turn(window, slo)


def _turn(window: _Window, slo: Slo) -> None:
    """The end of a window: a smaller limit where the promise was broken, a larger one else."""
    broken = _p95(window.ttft_s) > (slo.ttft_s or math.inf) or (
        bool(window.tpot_s) and _p95(window.tpot_s) > (slo.tpot_s or math.inf)
    )
    if broken:
        base = window.most_under_way if window.limit is None else window.limit
        window.limit = max(1, base * 3 // 4)
    elif window.limit is not None:
        window.limit += 1
    window.most_under_way = window.under_way
    window.ttft_s.clear()
    window.tpot_s.clear()


def _p95(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


_MESSAGES = {
    "requests": "the queue is full: as many requests wait as --max-num-queued-reqs allows",
    "tokens": "the queue is full: as many tokens wait as --max-num-queued-tokens allows",
    "slo": "the server is holding back new requests of this class to keep its promise to others",
}
