"""Requests and tokens per minute and key, as token buckets with the usual headers.

A bucket holds the budget of one minute and refills evenly. A request is charged before its body is
read, so that a refused one costs as much as any other, and its prompt before the engine gets it.
Its output tokens are charged as they are generated and may overdraw the bucket, so that no request
has to be priced by what it might produce. A request is refused while its bucket holds too little.

There is no clock in here: instants are arguments, in seconds.

The `limits` package counts events in windows; it has no bucket that can be overdrawn.
"""

from __future__ import annotations

import math

from ridgeline.serve.auth.keys import Caller, KeyRing
from ridgeline.serve.errors import ApiError


class TokenBucket:
    """Holds up to `per_minute` units, refilled evenly."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute, self._level, self._updated_s = per_minute, float(per_minute), now_s

    def level(self, now_s: float) -> float:
        """Units in the bucket; negative if it is overdrawn."""
        refill = max(0.0, now_s - self._updated_s) * self.per_minute / 60
        self._level, self._updated_s = min(self._level + refill, float(self.per_minute)), now_s
        return self._level

    def take(self, amount: float, now_s: float) -> None:
        self._level = self.level(now_s) - amount

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until it holds `amount`, or is full if `amount` exceeds its capacity."""
        missing = min(amount, float(self.per_minute)) - self.level(now_s)
        return max(0.0, missing * 60 / self.per_minute)


class KeyBudget:
    """The buckets of one key, by kind (requests, tokens); an unlimited kind has none."""

    def __init__(self, limits: dict[str, int], now_s: float) -> None:
        self._buckets = {kind: TokenBucket(limit, now_s) for kind, limit in limits.items()}

    @property
    def limits_tokens(self) -> bool:
        """Whether output tokens have to be charged."""
        return "tokens" in self._buckets

    def charge_request(self, now_s: float) -> None:
        """Charge one request; ApiError 429 if none is left."""
        self._check("requests", 1, now_s)
        if "requests" in self._buckets:
            self._buckets["requests"].take(1, now_s)

    def charge_prompt(self, num_tokens: int, now_s: float) -> dict[str, str]:
        """Charge the tokens of a prompt; the headers of the response.

        ApiError 429 with a Retry-After if the bucket holds too little; then nothing is charged.
        """
        self._check("tokens", num_tokens, now_s)
        if "tokens" in self._buckets:
            self._buckets["tokens"].take(num_tokens, now_s)
        return self.headers(now_s)

    def _check(self, kind: str, amount: int, now_s: float) -> None:
        bucket = self._buckets.get(kind)
        wait_s = 0.0 if bucket is None else bucket.wait_s(amount, now_s)
        if bucket is not None and wait_s > 0:
            headers = {**self.headers(now_s), "retry-after": str(math.ceil(wait_s))}
            message = f"the API key's limit of {bucket.per_minute} {kind} per minute is reached"
            raise ApiError(429, message, headers=headers)

    def charge_output(self, num_tokens: int, now_s: float) -> None:
        """Charge output tokens that were generated."""
        if self.limits_tokens:
            self._buckets["tokens"].take(num_tokens, now_s)

    def headers(self, now_s: float) -> dict[str, str]:
        """The rate limit headers of a response."""
        headers = {}
        for kind, bucket in self._buckets.items():
            level = bucket.level(now_s)
            reset_s = (bucket.per_minute - level) * 60 / bucket.per_minute
            headers[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(level)))
            headers[f"x-ratelimit-reset-{kind}"] = f"{reset_s:.3f}s"
        return headers


class KeyBudgets:
    """One budget per key; a single one without keys."""

    def __init__(
        self, keys: KeyRing, requests_per_minute: int | None, tokens_per_minute: int | None
    ) -> None:
        self._defaults = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        self._limits = {
            key.name: {"requests": key.requests_per_minute, "tokens": key.tokens_per_minute}
            for key in keys.keys
        }
        self._budgets: dict[str, KeyBudget] = {}

    def of(self, caller: Caller, now_s: float) -> KeyBudget:
        """The budget of a caller, created on first use."""
        budget = self._budgets.get(caller.name)
        if budget is None:
            own = self._limits.get(caller.name, {})
            limits = {kind: own.get(kind) or limit for kind, limit in self._defaults.items()}
            known = {kind: limit for kind, limit in limits.items() if limit is not None}
            budget = self._budgets[caller.name] = KeyBudget(known, now_s)
        return budget
