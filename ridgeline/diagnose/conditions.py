"""Conditions as data: `max_num_seqs < 8`, `ttft_p95_s > 0.5 * slo_ttft_s`, `batching != 'static'`.

The rules of the diagnosis and the preconditions of the ladder are rows of TOML, and this is the
whole language that they can use: a condition compares one named fact with a constant or with a
multiple of another fact. There are no calls, no attributes and no `eval`. If a fact is not known,
the condition is neither true nor false but *unknown*, so that a rule never fires on a number that
was not measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from ridgeline.report.numbers import rounded

Value = float | int | bool | str | None
Facts = Mapping[str, Value]

_NAME = r"[A-Za-z_]\w*"
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_CONDITION = re.compile(rf"^\s*({_NAME})\s*(<=|>=|==|!=|<|>)\s*(.+?)\s*$")
_MULTIPLE = re.compile(rf"^(?:({_NUMBER})\s*\*\s*)?({_NAME})$")
_WORDS: dict[str, Value] = {"true": True, "false": False, "none": None}
_ABSENT = object()


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """Compares the fact `name` with `constant`, or with `factor` times the fact `other`."""

    text: str
    name: str
    operator: str
    constant: Value = None
    factor: float = 1.0
    other: str | None = None

    def holds(self, facts: Facts) -> bool | None:
        """True or false; None if a fact that it needs is unknown."""
        left = facts.get(self.name, _ABSENT)
        right = self._right(facts)
        if left is _ABSENT or right is _ABSENT:
            return None
        return _compare(self.operator, left, right)

    def explain(self, facts: Facts) -> str:
        """The condition and the actual value of its fact."""
        if self.name not in facts:
            return f"{self.text} ({self.name} is unknown)"
        return f"{self.text} (found {plain(facts[self.name])})"

    def _right(self, facts: Facts) -> object:
        if self.other is None:
            return self.constant
        value = facts.get(self.other, _ABSENT)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        return self.factor * value


def parse(text: str) -> Condition:
    """Parse one condition.

    Raises ValueError, which can only be caused by the shipped data files.
    """
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
    """Three-valued conjunction (Kleene): false if any condition is, else unknown if any is."""
    values = [condition.holds(facts) for condition in conditions]
    if False in values:
        return False
    return None if None in values else True


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
    """Names of the facts that a template uses."""
    return set(_PLACEHOLDER.findall(template))


def fill(template: str, facts: Facts) -> str:
    """Replace `{name}` by the fact, formatted in the unit that its name ends with. A part in
    `[brackets]` is left out if a fact in it is unknown.
    """

    def part(match: re.Match[str]) -> str:
        known = all(name in facts for name in _PLACEHOLDER.findall(match[1]))
        return match[1] if known else ""

    whole = _OPTIONAL.sub(part, template)
    return _PLACEHOLDER.sub(lambda match: written(match[1], facts), whole)


def written(name: str, facts: Facts) -> str:
    """Format a fact by the suffix of its name: `_s` in ms or s, `_share` in %, `_bytes` in MB."""
    value = facts.get(name, _ABSENT)
    if value is _ABSENT:
        return "unknown"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return plain(value)
    if name.endswith("_share"):
        return f"{100 * value:.0f}%"
    if name.endswith("_bytes"):
        return f"{rounded(value / 1e6, 4)} MB"
    if name.endswith("_bytes_s"):
        return f"{rounded(value / 1e9)} GB/s"
    if name.endswith("_flop_s"):
        return f"{rounded(value / 1e9)} GFLOP/s"
    if name.endswith(("_tok_s", "_req_s")):
        return f"{rounded(value)}/s"
    if name.endswith("_s"):
        return seconds(value)
    return plain(value)


def seconds(value: float) -> str:
    """Format a duration with three significant digits: `3.2 ms`, `1.41 s`."""
    if abs(value) < 1:
        return f"{rounded(1000 * value)} ms"
    return f"{rounded(value)} s"


def plain(value: object) -> str:
    """Format a value without a unit."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return rounded(value)
    if isinstance(value, msgspec.Struct):
        given = msgspec.structs.asdict(value).items()
        return " ".join(f"{name}={plain(part)}" for name, part in given if part is not None)
    return "not set" if value is None else str(value)
