"""Names for answers and what is in them: nobody else has the same, and nobody has to be kept from
guessing them. (The system's random bytes let other threads run first, which at a busy server is a
third of a millisecond per request; what grants access is drawn from those, see `keys.py`.)"""

from __future__ import annotations

from random import getrandbits


def fresh_id(prefix: str, num_digits: int = 32) -> str:
    """`prefix` and so many hexadecimal digits."""
    return f"{prefix}{getrandbits(4 * num_digits):0{num_digits}x}"
