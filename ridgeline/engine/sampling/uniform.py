"""One uniform number per token, from a counter instead of a state.

What. SplitMix64 with random access (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014): the i-th output of the stream that starts at `mix(seed)`. The number
depends on (seed, index) and on nothing else, so the token a request draws at output position
`index` does not depend on what the request is batched with, how its prompt was chunked, whether it
was preempted and recomputed, or which replica serves it. A stateful generator would have to be
saved and moved in each of those cases.

Invariant. Equal (seed, index) give equal numbers on every machine: integer arithmetic only, no
libm.

When it loses. It is not a cryptographic generator; do not derive secrets from it.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1 - 2^-52] for `seed` (mod 2^64) and `index` (>= 0)."""
    start = _mix(seed & _MASK)
    return (_mix((start + (index + 1) * _GOLDEN) & _MASK) >> 12) * 2.0**-52


def _mix(word: int) -> int:
    """The finaliser of SplitMix64: a bijection of 64-bit words in which every input bit matters."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)
