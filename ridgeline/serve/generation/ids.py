"""Unique, non-secret ids. `getrandbits` and not `os.urandom`: the system call releases the GIL, and
cost 0.29 ms per request of a busy server. Keys are drawn from `secrets`, in `auth/keys.py`."""

from __future__ import annotations

from hashlib import blake2b
from random import getrandbits


def new_id(prefix: str, num_digits: int = 32) -> str:
    """`prefix` followed by random hexadecimal digits."""
    return f"{prefix}{getrandbits(4 * num_digits):0{num_digits}x}"


def derive_id(prefix: str, response_id: str, place: str, num_digits: int = 32) -> str:
    """`prefix` followed by digits that depend on the response and on the place in it only.

    A response that another server continues keeps the ids of its parts.
    """
    digest = blake2b(f"{response_id}/{place}".encode(), digest_size=num_digits // 2)
    return prefix + digest.hexdigest()
