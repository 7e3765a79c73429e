"""`synthetic:input=256,output=128`: random token ids of given lengths.

Measures speed only: the tokens are meaningless, and no tokenizer changes the lengths. `cv` is the
coefficient of variation (standard deviation / mean) of both lengths, which are drawn from a
log-normal with the given mean; 0 fixes them. The first `prefix` tokens of every prompt, part of
`input`, are the same, to exercise a prefix cache; with `groups` > 1 there are that many prefixes,
drawn by Zipf's law. Ids are in [16, vocab), because low ids are often special. Misleading wherever
the text matters: speculation, n-gram drafting and expert routing see noise.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import msgspec

from ridgeline.config.units import MAX_LENGTH
from ridgeline.errors import BadInput
from ridgeline.measure.workload.base import LoadRequest

FIRST_ID = 16
MAX_GROUPS, MAX_CV, MAX_VOCAB = 100_000, 100.0, 1 << 31
_FIX = "write for example synthetic:input=256,output=128,cv=0.5,prefix=64"


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
            ("input", self.input, 1, MAX_LENGTH),
            ("output", self.output, 1, MAX_LENGTH),
            ("prefix", self.prefix, 0, MAX_LENGTH),
            ("groups", self.groups, 1, MAX_GROUPS),
            ("vocab", self.vocab, FIRST_ID + 1, MAX_VOCAB),
        )
        for name, value, low, high in limits:
            if value < low:
                raise BadInput(f"synthetic: {name} is too small", value=value, limit=f">= {low}")
            if value > high:
                raise BadInput(f"synthetic: {name} is too large", value=value, limit=f"<= {high}")
        if self.prefix * self.groups > MAX_LENGTH:
            raise BadInput(
                "synthetic: all prefixes together are too long",
                value=f"{self.groups} of {self.prefix} tokens",
                limit=f"{MAX_LENGTH} tokens",
            )
        if self.prefix > self.input:
            raise BadInput(
                "synthetic: prefix is longer than input",
                value=self.prefix,
                limit=self.input,
                fix=_FIX,
            )
        if not 0 <= self.cv <= MAX_CV:
            raise BadInput(
                "synthetic: cv is out of range", value=self.cv, limit=f"0 to {MAX_CV:g}", fix=_FIX
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
    """A log-normal draw in [1, MAX_LENGTH]: sigma² = ln(1 + cv²), mu = ln(mean) - sigma²/2."""
    if cv == 0:
        return mean
    variance = math.log1p(cv * cv)
    drawn = rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))
    return max(1, round(min(drawn, MAX_LENGTH)))


def parse(options: str) -> Synthetic:
    """Parse `input=256,output=128,…`; every part is optional. Raises BadInput."""
    return msgspec.convert(parse_options(options), Synthetic)


def parse_options(options: str) -> dict[str, int | float]:
    """The given fields. Raises BadInput for an unknown or malformed one."""
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
