"""Unique, non-secret ids. `getrandbits` and not `os.urandom`: the system call releases the GIL, and
cost 0.29 ms per request of a busy server. Keys are drawn from `secrets`, in `auth/keys.py`."""

from __future__ import annotations

from random import getrandbits


def new_id(prefix: str, num_digits: int = 32) -> str:
    """`prefix` followed by random hexadecimal digits."""
    return f"{prefix}{getrandbits(4 * num_digits):0{num_digits}x}"
