"""Pinned prefixes: blocks that are evicted last, for a time, within bounds per account.

A pin names blocks by their digests, so it holds for blocks that are computed later as well. It is
a preference and no reservation: when nothing but pinned blocks is left to evict, they go too, and
every request can still use the whole cache. All pins together hold at most `max_blocks`, those of
one account at most half of that, so that no account pins the whole cache.
"""

from __future__ import annotations

from collections import Counter

import msgspec

MAX_ACCOUNT_SHARE = 0.5
"""Of all pinned blocks, those that one account may have."""


class Pin(msgspec.Struct):
    """A pinned prefix, by the digests of its full blocks."""

    account: str
    digests: tuple[bytes, ...]
    until_s: float


class PrefixPins:
    """The pins of one cache. `max_blocks` are places: with groups of layers, a block of each."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._pins: dict[tuple[str, bytes], Pin] = {}  # by account and last digest
        self._count: Counter[bytes] = Counter()  # pins of each digest
        self._by_account: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._count)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._count

    def add(self, account: str, digests: tuple[bytes, ...], until_s: float) -> int:
        """Pin a prefix, or prolong its pin; the number of its blocks that are pinned.

        A prefix that does not fit within the bounds is pinned as far as it fits.
        """
        for key in [
            (account, digest) for digest in digests if (account, digest) in self._pins
        ]:  # a shorter pin of the same text, which this one replaces
            until_s = max(until_s, self._pins[key].until_s)
            self._remove(key)
        room = int(self.max_blocks * MAX_ACCOUNT_SHARE) - self._by_account[account]
        digests = digests[: max(0, room)]
        num_known = next((i for i, own in enumerate(digests) if own not in self), len(digests))
        digests = digests[: num_known + max(0, self.max_blocks - len(self))]
        if digests:
            self._pins[account, digests[-1]] = Pin(account, digests, until_s)
            self._count.update(digests)
            self._by_account[account] += len(digests)
        return len(digests)

    def expire(self, now_s: float) -> list[bytes]:
        """Remove the pins that are over; the digests that no pin holds any more."""
        over = [key for key, pin in self._pins.items() if pin.until_s <= now_s]
        return [digest for key in over for digest in self._remove(key)]

    def forget(self, account: str, digests: tuple[bytes, ...]) -> list[bytes]:
        """Remove the account's pins that hold any of the digests; as `expire`."""
        wanted = set(digests)
        keys = [
            key
            for key, pin in self._pins.items()
            if pin.account == account and not wanted.isdisjoint(pin.digests)
        ]
        return [digest for key in keys for digest in self._remove(key)]

    def _remove(self, key: tuple[str, bytes]) -> list[bytes]:
        pin = self._pins.pop(key)
        self._by_account[pin.account] -= len(pin.digests)
        if not self._by_account[pin.account]:
            del self._by_account[pin.account]
        free = []
        for digest in pin.digests:
            self._count[digest] -= 1
            if not self._count[digest]:
                del self._count[digest]
                free.append(digest)
        return free
