"""`synthetic:input=256,output=128`: random token ids of chosen lengths.

For speed alone: the tokens mean nothing, and no tokenizer stands between the length asked and the
length served. `cv` is the coefficient of variation (standard deviation / mean) of both lengths,
drawn from a log-normal whose mean is the length asked; 0 fixes them. `prefix` tokens of every
prompt are the same, to exercise a prefix cache; they count as part of `input`; with `groups` > 1
there are so many different prefixes, drawn by Zipf's law. Ids lie in [16, vocab): low ids are often
special. It misleads where the text matters: speculation, n-gram
drafting and expert routing see noise.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import msgspec

from ridgeline.errors import BadInput
from ridgeline.measure.workload.base import LoadRequest

FIRST_ID = 16
MOST_TOKENS = 10_000_000  # of a prompt, of an answer, and of all prefixes together
MOST_GROUPS, MOST_CV, MOST_VOCAB = 100_000, 100.0, 1 << 31
_FIX = "write e.g. synthetic:input=256,output=128,cv=0.5,prefix=64"


class Synthetic(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths in tokens; `cv` without unit; token ids below `vocab`."""

    input: int = 256
    output: int = 128
    cv: float = 0.0
    prefix: int = 0
    groups: int = 1
    vocab: int = 2048

    def __post_init__(self) -> None:
        limits = (
            ("input", self.input, 1, MOST_TOKENS),
            ("output", self.output, 1, MOST_TOKENS),
            ("prefix", self.prefix, 0, MOST_TOKENS),
            ("groups", self.groups, 1, MOST_GROUPS),
            ("vocab", self.vocab, FIRST_ID + 1, MOST_VOCAB),
        )
        for name, value, low, high in limits:
            if value < low:
                raise BadInput(f"synthetic: {name} is too small", value=value, limit=f">= {low}")
            if value > high:
                raise BadInput(f"synthetic: {name} is too large", value=value, limit=f"<= {high}")
        if self.prefix * self.groups > MOST_TOKENS:
            raise BadInput(
                "synthetic: groups of prefixes are too long together",
                value=f"{self.groups} of {self.prefix} tokens",
                limit=f"{MOST_TOKENS} tokens",
            )
        if self.prefix > self.input:
            raise BadInput(
                "synthetic: prefix is longer than input",
                value=self.prefix,
                limit=self.input,
                fix=_FIX,
            )
        if not 0 <= self.cv <= MOST_CV:
            raise BadInput(
                "synthetic: cv is out of range", value=self.cv, limit=f"0 to {MOST_CV:g}", fix=_FIX
            )

    @property
    def name(self) -> str:
        default = Synthetic()
        given = [f"input={self.input}", f"output={self.output}"]
        for field in ("cv", "prefix", "groups", "vocab"):
            if getattr(self, field) != getattr(default, field):
                given.append(f"{field}={getattr(self, field)}")
        return "synthetic:" + ",".join(given)

    def sample(self, n: int, seed: int) -> Iterator[LoadRequest]:
        heads = [
            tuple(self._ids(random.Random(f"{self.name}/prefix{group or ''}"), self.prefix))
            for group in range(self.groups)
        ]
        zipf = [1 / rank for rank in range(1, self.groups + 1)]
        rng = random.Random(f"{self.name}/{seed}")
        for index in range(n):
            num_input = max(_length(rng, self.input, self.cv), self.prefix)
            shared = rng.choices(heads, zipf)[0] if self.groups > 1 else heads[0]
            body = self._ids(rng, num_input - self.prefix)
            yield LoadRequest(
                id=f"synthetic-{seed}-{index}",
                kind="synthetic",
                prompt=(*shared, *body),
                max_tokens=_length(rng, self.output, self.cv),
            )

    def _ids(self, rng: random.Random, count: int) -> list[int]:
        return rng.choices(range(FIRST_ID, self.vocab), k=count)


def _length(rng: random.Random, mean: int, cv: float) -> int:
    """A log-normal draw with this mean and cv, from 1 to MOST_TOKENS: sigma² = ln(1 + cv²), mu =
    ln(mean) - sigma²/2.
    """
    if cv == 0:
        return mean
    variance = math.log1p(cv * cv)
    drawn = rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))
    return max(1, round(min(drawn, MOST_TOKENS)))


def parse(options: str) -> Synthetic:
    """`input=256,output=128,…`; every part is optional."""
    return msgspec.convert(options_of(options), Synthetic)


def options_of(options: str) -> dict[str, int | float]:
    """The fields that are given; BadInput names an unknown or malformed one."""
    values: dict[str, int | float] = {}
    for part in filter(None, options.split(",")):
        name, equals, raw = part.partition("=")
        if not equals or name not in Synthetic.__struct_fields__:
            known = ", ".join(Synthetic.__struct_fields__)
            raise BadInput("synthetic: unknown option", value=part, limit=known, fix=_FIX)
        if name in values:
            raise BadInput(f"synthetic: {name} is given twice", value=options, fix=_FIX)
        values[name] = _number(part, raw, whole=name != "cv")
    return values


def _number(part: str, raw: str, *, whole: bool) -> int | float:
    try:
        return int(raw) if whole else float(raw)
    except ValueError:
        kind = "a whole number" if whole else "a number"
        raise BadInput(f"synthetic: the value is not {kind}", value=part, fix=_FIX) from None
