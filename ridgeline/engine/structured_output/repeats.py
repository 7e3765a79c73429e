"""A bound on the repetitions in regular expressions.

The derivative of a sequence of n optional parts is an alternative of n sequences: compilation took
9 s of CPU time for `a*` 30,000 times, and one mask 1 s for `a*` 10,000 times. llguidance's fuel
counts the expressions and not their lengths.
"""

from __future__ import annotations

import re

MAX_REPEATS = 2000
MANY_REPEATS = 200
_REPEAT = re.compile(r"[*+?{]")


def count_repeats(text: str) -> int:
    """How many repetitions a regular expression or a grammar has at most."""
    return len(_REPEAT.findall(text))


def check_repeats(text: str) -> None:
    """Raises ValueError for too many repetitions."""
    num = count_repeats(text)
    if num > MAX_REPEATS:
        raise ValueError(f"{num} repetitions; {MAX_REPEATS} are allowed")


def step_fuel(most: int, text: str) -> int:
    """`most`, or less for a text whose repetitions make each derivative long."""
    return most * MANY_REPEATS // max(MANY_REPEATS, count_repeats(text))
