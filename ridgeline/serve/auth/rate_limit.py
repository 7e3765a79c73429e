"""Requests and tokens per minute and key: token buckets, and the usual headers.

A bucket holds a minute's worth and refills evenly. A request pays for itself and its prompt before
any work; its output tokens are paid as they come and may take the bucket below zero, so that no
request has to be priced by what it might produce. Refused is who finds the bucket too empty.
No clock: instants come in.
"""

from __future__ import annotations

import math

from ridgeline.serve.auth.keys import Caller, KeyRing
from ridgeline.serve.errors import ApiError


class Bucket:
    """Up to `per_minute` tokens, refilled evenly."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute, self._level, self._at_s = per_minute, float(per_minute), now_s

    def level(self, now_s: float) -> float:
        """What is in it."""
        gained = max(0.0, now_s - self._at_s) * self.per_minute / 60
        self._level, self._at_s = min(self._level + gained, float(self.per_minute)), now_s
        return self._level

    def take(self, amount: float, now_s: float) -> None:
        self._level = self.level(now_s) - amount

    def wait_s(self, amount: float, now_s: float) -> float:
        """How long until it holds `amount`; 0 where it does. More than it can hold counts as all
        that it can hold: a large request waits for a full bucket."""
        missing = min(amount, float(self.per_minute)) - self.level(now_s)
        return max(0.0, missing * 60 / self.per_minute)


class Account:
    """The buckets of one key; a kind without a limit is not there."""

    def __init__(self, limits: dict[str, int], now_s: float) -> None:
        self._buckets = {kind: Bucket(limit, now_s) for kind, limit in limits.items()}

    def charge(self, num_tokens: int, now_s: float) -> dict[str, str]:
        """Pay for one request with a prompt of `num_tokens`; the headers of its answer.

        ApiError 429 with the time to come back where a bucket is too empty; then nothing is paid.
        """
        if not self._buckets:
            return {}
        costs = {"requests": 1, "tokens": num_tokens}
        waits = {kind: bucket.wait_s(costs[kind], now_s) for kind, bucket in self._buckets.items()}
        wait_s = max(waits.values(), default=0.0)
        if wait_s > 0:
            kind = max(waits, key=waits.__getitem__)
            raise self._refusal(kind, wait_s, now_s)
        for kind, bucket in self._buckets.items():
            bucket.take(costs[kind], now_s)
        return self.headers(now_s)

    @property
    def counts_tokens(self) -> bool:
        """Whether tokens are limited, so that somebody has to tell those that were `spent`."""
        return "tokens" in self._buckets

    def spent(self, num_tokens: int, now_s: float) -> None:
        """Output tokens that were produced."""
        if self.counts_tokens:
            self._buckets["tokens"].take(num_tokens, now_s)

    def headers(self, now_s: float) -> dict[str, str]:
        found = {}
        for kind, bucket in self._buckets.items():
            level = bucket.level(now_s)
            reset_s = (bucket.per_minute - level) * 60 / bucket.per_minute
            found[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
            found[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(level)))
            found[f"x-ratelimit-reset-{kind}"] = f"{reset_s:.3f}s"
        return found

    def _refusal(self, kind: str, wait_s: float, now_s: float) -> ApiError:
        limit = self._buckets[kind].per_minute
        headers = {**self.headers(now_s), "retry-after": str(math.ceil(wait_s))}
        message = f"this key's limit of {limit} {kind} per minute is reached"
        return ApiError(429, message, headers=headers)


class Accounts:
    """One account per key; without keys, one for everybody."""

    def __init__(
        self, ring: KeyRing, requests_per_minute: int | None, tokens_per_minute: int | None
    ) -> None:
        self._defaults = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        self._limits = {
            key.name: {"requests": key.requests_per_minute, "tokens": key.tokens_per_minute}
            for key in ring.keys
        }
        self._accounts: dict[str, Account] = {}

    def of(self, caller: Caller, now_s: float) -> Account:
        found = self._accounts.get(caller.name)
        if found is None:
            own = self._limits.get(caller.name, {})
            limits = {kind: own.get(kind) or limit for kind, limit in self._defaults.items()}
            known = {kind: limit for kind, limit in limits.items() if limit is not None}
            found = self._accounts[caller.name] = Account(known, now_s)
        return found
