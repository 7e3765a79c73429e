"""A managed API as the last backend: before the first byte of an answer, within a budget.

It gets a request when no backend is ready after a short wait, or when all that were tried answered
with an error. What it costs is estimated before and corrected afterwards; a request that might
exceed the hour's budget is not sent. After several failures in a row nothing is sent for a while.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec
from prometheus_client.core import CounterMetricFamily, Metric

from ridgeline.errors import DECODE_ERRORS, BadInput
from ridgeline.fleet.backends import Backend
from ridgeline.fleet.call import RoutedCall
from ridgeline.fleet.upstream import Headers

PATHS = frozenset(("/v1/completions", "/v1/chat/completions", "/v1/responses"))
SERVED_BY = (b"x-ridgeline-served-by", b"fallback")
REFUSAL_HEADER = b"x-ridgeline-fallback"  # `never`: the request must not leave the house
_KEY_HEADERS = (b"authorization", b"x-api-key", b"cookie", REFUSAL_HEADER)
_BYTES_PER_TOKEN = 150  # of a stream of chunks: an estimate on the dear side
_DEFAULT_MAX_TOKENS = 1024
_HOUR_S = 3600.0


class FallbackConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`after_s`: wait for a backend before; prices in dollars per million tokens."""

    api_key: str | None
    model: str | None
    input_price: float
    output_price: float
    dollars_per_hour: float
    after_s: float


class CircuitBreaker:
    """Opens for `open_s` after `max_failures` in a row; then one request at a time may try, and
    `num_successes` of them close it. Instants in seconds."""

    def __init__(self, max_failures: int = 5, open_s: float = 30.0, num_successes: int = 2) -> None:
        self._max_failures, self._open_s, self._num_successes = max_failures, open_s, num_successes
        self._num_failures = self._num_good = 0
        self._open_until_s = -math.inf
        self._is_half_open = self._is_trying = False

    def is_open(self, now_s: float) -> bool:
        """Whether a request would be refused now."""
        return now_s < self._open_until_s or (self._is_half_open and self._is_trying)

    def start(self, now_s: float) -> None:
        """A request is sent."""
        self._is_trying = self._is_half_open

    def end(self, now_s: float, *, succeeded: bool) -> None:
        """It has ended."""
        self._is_trying = False
        if succeeded:
            self._num_failures, self._num_good = 0, self._num_good + 1
            self._is_half_open = self._is_half_open and self._num_good < self._num_successes
            return
        self._num_good, self._num_failures = 0, self._num_failures + 1
        if self._is_half_open or self._num_failures >= self._max_failures:
            self._is_half_open, self._open_until_s = True, now_s + self._open_s


class HourlyBudget:
    """Dollars spent or reserved within the last hour."""

    def __init__(self, dollars: float) -> None:
        self._dollars = dollars
        self._spent: deque[tuple[float, float]] = deque()
        self._reserved = 0.0

    def spent(self, now_s: float) -> float:
        while self._spent and self._spent[0][0] < now_s - _HOUR_S:
            self._spent.popleft()
        return sum(dollars for _, dollars in self._spent)

    def has_room(self, dollars: float, now_s: float) -> bool:
        return self.spent(now_s) + self._reserved + dollars <= self._dollars

    def reserve(self, dollars: float) -> None:
        self._reserved += dollars

    def settle(self, reserved: float, dollars: float, now_s: float) -> None:
        """A reservation has become an expense."""
        self._reserved -= reserved
        self._spent.append((now_s, dollars))


class FallbackControl(Protocol):
    """What the gateway asks of a fallback."""

    @property
    def after_s(self) -> float: ...

    def admits(self, call: RoutedCall, now_s: float) -> bool: ...

    def is_backend(self, backend: Backend) -> bool: ...

    def choose(self, call: RoutedCall, now_s: float) -> Backend: ...

    def request(self, call: RoutedCall) -> tuple[bytes, Headers, bytes]: ...

    def end(self, call: RoutedCall, now_s: float) -> None: ...

    def metrics(self) -> Iterable[Metric]: ...


class NoFallback:
    """A gateway without one."""

    after_s = math.inf

    def admits(self, call: RoutedCall, now_s: float) -> bool:
        return False

    def is_backend(self, backend: Backend) -> bool:
        return False

    def choose(self, call: RoutedCall, now_s: float) -> Backend:
        raise AssertionError("there is no fallback")

    def request(self, call: RoutedCall) -> tuple[bytes, Headers, bytes]:
        raise AssertionError("there is no fallback")

    def end(self, call: RoutedCall, now_s: float) -> None:
        raise AssertionError("there is no fallback")

    def metrics(self) -> Iterable[Metric]:
        return ()


class ManagedApi:
    """An API with a price, at `backend`."""

    def __init__(self, backend: Backend, config: FallbackConfig) -> None:
        if not config.dollars_per_hour > 0:
            raise BadInput(
                "--fallback-url needs --fallback-dollars-per-hour, so that an outage has a price",
                fix="name the most that it may cost in an hour",
            )
        if not config.input_price + config.output_price > 0:
            raise BadInput(
                "--fallback-dollars-per-hour bounds nothing without prices",
                fix="add --fallback-input-price and --fallback-output-price",
            )
        self.backend, self._config, self.after_s = backend, config, config.after_s
        self.breaker, self.budget = CircuitBreaker(), HourlyBudget(config.dollars_per_hour)
        self.num_requests = self.num_failed = 0
        self.dollars = 0.0

    def admits(self, call: RoutedCall, now_s: float) -> bool:
        """Whether the call may go to the API now: nothing of its answer was sent, it does not
        refuse, and breaker and budget allow it."""
        refusal = dict(call.headers).get(REFUSAL_HEADER, b"")
        return (
            call.path in PATHS
            and call.fallback == "possible"
            and not call.relay.is_bound
            and not call.num_bytes
            and refusal.strip().lower() != b"never"
            and not self.breaker.is_open(now_s)
            and self.budget.has_room(self._reservation(call), now_s)
        )

    def is_backend(self, backend: Backend) -> bool:
        return backend is self.backend

    def choose(self, call: RoutedCall, now_s: float) -> Backend:
        """Send the call to the API: its only attempt there."""
        call.fallback = "tried"
        self.num_requests += 1
        self.breaker.start(now_s)
        self.budget.reserve(self._reservation(call))
        return self.backend

    def request(self, call: RoutedCall) -> tuple[bytes, Headers, bytes]:
        """Path, headers with the API's key in place of the client's, and the body."""
        headers = [pair for pair in call.headers if pair[0] not in _KEY_HEADERS]
        if self._config.api_key is not None:
            headers.append((b"authorization", f"Bearer {self._config.api_key}".encode()))
        body = call.body
        if self._config.model is not None:
            fields = msgspec.json.decode(body, type=dict[str, Any])
            body = msgspec.json.encode({**fields, "model": self._config.model})
        return call.path.encode(), headers, body

    def end(self, call: RoutedCall, now_s: float) -> None:
        """The attempt has ended: learn whether it succeeded, and what it cost."""
        succeeded = call.status == 200 and not call.has_failed
        self.num_failed += not succeeded
        self.breaker.end(now_s, succeeded=succeeded)
        dollars = self._cost(*_usage(call)) if call.status == 200 else 0.0
        self.dollars += dollars
        self.budget.settle(self._reservation(call), dollars, now_s)

    def metrics(self) -> Iterable[Metric]:
        """Series of a scrape."""
        for name, text, value in (
            ("requests", "Requests that the managed API got.", self.num_requests),
            ("failed", "Those that it did not answer with 200.", self.num_failed),
            ("dollars", "What it cost, partly by estimate.", self.dollars),
        ):
            yield CounterMetricFamily(f"ridgeline_fallback_{name}", text, value=value)

    def _reservation(self, call: RoutedCall) -> float:
        return self._cost(call.num_prompt, call.max_tokens or _DEFAULT_MAX_TOKENS)

    def _cost(self, num_prompt: int, num_output: int) -> float:
        config = self._config
        return (num_prompt * config.input_price + num_output * config.output_price) / 1e6


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class _WithUsage(msgspec.Struct):
    usage: _Usage | None = None


def _usage(call: RoutedCall) -> tuple[int, int]:
    """Tokens of the prompt and of the output: as the API counted them, else by estimate."""
    if call.answer:
        try:
            usage = msgspec.json.decode(call.answer, type=_WithUsage).usage
        except DECODE_ERRORS:
            usage = None
        if usage is not None:
            num_prompt = usage.prompt_tokens or usage.input_tokens or 0
            return num_prompt, usage.completion_tokens or usage.output_tokens or 0
    return call.num_prompt, -(-call.num_bytes // _BYTES_PER_TOKEN)
