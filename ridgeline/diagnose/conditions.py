"""Conditions as data: `max_num_seqs < 8`, `ttft_p95_s > 0.5 * slo_ttft_s`, `batching != 'static'`.

The rules of diagnosis and the preconditions of the ladder are rows of TOML; this is the whole
language they may speak. It compares one named fact with a constant or with a multiple of another
fact, and nothing else: no calls, no attributes, no `eval`. A fact that is not known makes a
condition neither true nor false but *unknown*, so that a rule never fires on a number that nobody
measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

Value = float | int | bool | str | None
Facts = Mapping[str, Value]

_NAME = r"[A-Za-z_]\w*"
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_CONDITION = re.compile(rf"^\s*({_NAME})\s*(<=|>=|==|!=|<|>)\s*(.+?)\s*$")
_MULTIPLE = re.compile(rf"^(?:({_NUMBER})\s*\*\s*)?({_NAME})$")
_WORDS: dict[str, Value] = {"true": True, "false": False, "none": None}
_ABSENT = object()


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """`name` `operator` (`constant`, or `factor` x the fact called `other`)."""

    text: str
    name: str
    operator: str
    constant: Value = None
    factor: float = 1.0
    other: str | None = None

    def holds(self, facts: Facts) -> bool | None:
        """True or false; None where a fact it needs is unknown."""
        left = facts.get(self.name, _ABSENT)
        right = self._right(facts)
        if left is _ABSENT or right is _ABSENT:
            return None
        return _compare(self.operator, left, right)

    def explain(self, facts: Facts) -> str:
        """The condition with the value that was found, for the reader."""
        if self.name not in facts:
            return f"{self.text} (not known here: {self.name})"
        return f"{self.text} (found {plain(facts[self.name])})"

    def _right(self, facts: Facts) -> object:
        if self.other is None:
            return self.constant
        value = facts.get(self.other, _ABSENT)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        return self.factor * value


def parse(text: str) -> Condition:
    """One condition; ValueError (a mistake in our own data files) names what cannot be read."""
    match = _CONDITION.match(text)
    if match is None:
        raise ValueError(f"not a condition: {text!r}")
    name, operator, right = match.groups()
    if right[0] in "'\"":
        if len(right) < 2 or right[-1] != right[0]:
            raise ValueError(f"unclosed string in {text!r}")
        return Condition(text=text, name=name, operator=operator, constant=right[1:-1])
    if right in _WORDS:
        return Condition(text=text, name=name, operator=operator, constant=_WORDS[right])
    if re.fullmatch(_NUMBER, right):
        return Condition(text=text, name=name, operator=operator, constant=float(right))
    multiple = _MULTIPLE.match(right)
    if multiple is None:
        raise ValueError(f"cannot read the right side of {text!r}")
    factor = float(multiple[1]) if multiple[1] else 1.0
    return Condition(text=text, name=name, operator=operator, factor=factor, other=multiple[2])


def all_hold(conditions: tuple[Condition, ...], facts: Facts) -> bool | None:
    """Kleene's and: one false makes it false, else one unknown makes it unknown."""
    found = [condition.holds(facts) for condition in conditions]
    if False in found:
        return False
    return None if None in found else True


def _compare(operator: str, left: object, right: object) -> bool | None:
    if operator == "==":
        return left == right
    if operator == "!=":
        return left != right
    if not isinstance(left, int | float) or not isinstance(right, int | float):
        return None
    if operator == "<":
        return left < right
    if operator == "<=":
        return left <= right
    return left > right if operator == ">" else left >= right


_PLACEHOLDER = re.compile(rf"\{{({_NAME})\}}")


_OPTIONAL = re.compile(r"\[([^\[\]]*)\]")


def named_in(template: str) -> set[str]:
    """The facts that a template speaks of."""
    return set(_PLACEHOLDER.findall(template))


def fill(template: str, facts: Facts) -> str:
    """Put facts into `{name}` places, each written in the unit that its name carries. A part in
    `[brackets]` is left out where a fact in it is unknown.
    """

    def part(match: re.Match[str]) -> str:
        known = all(name in facts for name in _PLACEHOLDER.findall(match[1]))
        return match[1] if known else ""

    whole = _OPTIONAL.sub(part, template)
    return _PLACEHOLDER.sub(lambda match: written(match[1], facts), whole)


def written(name: str, facts: Facts) -> str:
    """A fact as a reader wants it: `_s` in ms or s, `_share` in percent, `_bytes` in MB."""
    value = facts.get(name, _ABSENT)
    if value is _ABSENT:
        return "unknown"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return plain(value)
    if name.endswith("_share"):
        return f"{100 * value:.0f}%"
    if name.endswith("_bytes"):
        return f"{value / 1e6:.4g} MB"
    if name.endswith("_bytes_s"):
        return f"{value / 1e9:.3g} GB/s"
    if name.endswith("_flop_s"):
        return f"{value / 1e9:.3g} GFLOP/s"
    if name.endswith(("_tok_s", "_req_s")):
        return f"{value:.3g}/s"
    if name.endswith("_s"):
        return seconds(value)
    return plain(value)


def seconds(value: float) -> str:
    """3.2 ms, 0.41 s: three figures in the unit that reads best."""
    if abs(value) < 1:
        return f"{1000 * value:.3g} ms"
    return f"{value:.3g} s"


def plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    return "not set" if value is None else str(value)
