"""Bounds on the repetitions in regular expressions.

The derivative of a sequence of n optional parts is an alternative of n sequences: compilation took
9 s of CPU time for `a*` 30,000 times, and one mask 1 s for `a*` 10,000 times. llguidance's fuel
counts the expressions and not their lengths.

A counted repetition is a state per copy: each mask of `((ab){100}c){300}` took 60 ms. The library
repeats one character without a state for each, but not groups: a mask within `(ab){5000}` takes
14 ms where it is the pattern of a schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_REPEATS = 2000
MANY_REPEATS = 200
MAX_COPIES = 20_000
MAX_GROUP_COPIES = 10_000
"""Of characters and classes, by repetitions of the groups that they are in."""
_REPEAT = re.compile(r"[*+?{]")
_PART = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{(\d*),?(\d*)\}|.", re.DOTALL)


def count_repeats(text: str) -> int:
    """How many repetitions a regular expression or a grammar has at most."""
    return len(_REPEAT.findall(text))


def count_copies(pattern: str) -> int:
    """The most copies that the counted repetitions of a regular expression make of their parts.

    `a{3}` makes 3, and `(a{3}b{2}){10}` 50.
    """
    groups, last = [0], 0  # copies within each open group; of the latest part
    for match in _PART.finditer(pattern):
        counts = [int(number) for number in match.groups() if number]
        if counts:
            times = max(counts)
            groups[-1] += max(last, 1) * times - last
            last = max(last, 1) * times
        elif match[0] == "(":
            groups.append(0)
        elif match[0] == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        else:
            last = 0
    return sum(groups)


def count_group_copies(pattern: str) -> int:
    """How many characters and classes the counted repetitions of groups add to a regex.

    `(ab){4}` adds 6, `a{4}` none.
    """
    groups, last = [0], 0  # parts within each open group, with their copies; of the latest part
    added = 0
    for match in _PART.finditer(pattern):
        counts = [int(number) for number in match.groups() if number]
        if counts:
            more = last * (max(1, *counts) - 1)
            added, groups[-1], last = added + more, groups[-1] + more, last + more
        elif match[0] == "(":
            groups.append(0)
        elif match[0] == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        elif match[0] not in "*+?|":
            groups[-1] += 1
            last = 0  # repeated alone, it stays one part
    return added


def check_repeats(text: str) -> None:
    """Raises ValueError for too many repetitions, or too many copies of what they repeat."""
    num = count_repeats(text)
    if num > MAX_REPEATS:
        raise ValueError(f"{num} repetitions; {MAX_REPEATS} are allowed")
    if (num := count_copies(text)) > MAX_COPIES:
        raise ValueError(f"{num} copies by counted repetitions; {MAX_COPIES} are allowed")
    check_group_copies([text])


def check_group_copies(patterns: Iterable[str]) -> None:
    """Raises ValueError if the repeated groups of `patterns`, together, are too much."""
    if (num := sum(map(count_group_copies, patterns))) > MAX_GROUP_COPIES:
        raise ValueError(
            f"{num} copies of characters in repeated groups; {MAX_GROUP_COPIES} are allowed"
        )


def step_fuel(most: int, text: str) -> int:
    """`most`, or less for a text whose repetitions make each derivative long."""
    return most * MANY_REPEATS // max(MANY_REPEATS, count_repeats(text))
