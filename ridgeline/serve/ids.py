"""Names for answers and what is in them: nobody else has the same, and nobody has to be kept from
guessing them. Who asks the system for random bytes lets other threads run first: 0.29 ms a request
in a profile of a busy server, 0.01 on its own. What grants access is drawn there, see `keys.py`."""

from __future__ import annotations

from random import getrandbits


def fresh_id(prefix: str, num_digits: int = 32) -> str:
    """`prefix` and so many hexadecimal digits."""
    return f"{prefix}{getrandbits(4 * num_digits):0{num_digits}x}"
