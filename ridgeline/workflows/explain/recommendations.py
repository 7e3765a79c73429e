"""Whether each technique suits this model on this machine, by arithmetic alone.

For every rung of the ladder: whether these settings meet its needs, and how it would move the
roofline bounds of a token in a full decode step and of a 512-token prompt. Bounds are not
predictions: what the engine adds to them is what `ridgeline optimize` measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec

from ridgeline.config.settings import Settings
from ridgeline.diagnose.conditions import seconds
from ridgeline.errors import UserError
from ridgeline.modelspec.cost import decode_work, prefill_work
from ridgeline.modelspec.model import ModelSpec
from ridgeline.optimize import ladder
from ridgeline.optimize.ladder import Rung, RungCandidate, candidates_of, unmet_need
from ridgeline.roofline import Peaks, bound

CONTEXT = 512  # tokens of each sequence in the decode step
PROMPT = 512  # tokens of the prompt
MIN_CHANGE = 0.02  # of a bound, to be reported


class StaticBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Least seconds per token of a decode step with every slot occupied, and of one prompt."""

    decode_token_s: float
    prompt_s: float
    slots: int


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """What one rung of the ladder would do.

    `verdict`: in use, not now, moves the bound, or measure it.
    """

    rung: str
    title: str
    verdict: str
    reason: str
    hurts_when: str


class PricedConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration's resolved values, its model spec and the machine's peaks."""

    values: dict[str, object]
    spec: ModelSpec
    peaks: Peaks

    @property
    def bounds(self) -> StaticBounds:
        slots = int(str(self.values["max_num_seqs"]))
        decode, prefill = decode_work(self.spec, slots, CONTEXT), prefill_work(self.spec, PROMPT)
        return StaticBounds(
            decode_token_s=bound(decode, self.peaks).seconds / slots,
            prompt_s=bound(prefill, self.peaks).seconds,
            slots=slots,
        )


PriceConfiguration = Callable[[Settings], PricedConfiguration]


def recommendations(settings: Settings, price: PriceConfiguration) -> Iterator[Recommendation]:
    """One per rung of the built-in ladder, in its order."""
    current = price(settings)
    for rung in ladder.load_default_ladder().rungs:
        yield _recommendation(rung, settings, current, price)


def _recommendation(
    rung: Rung, settings: Settings, current: PricedConfiguration, price: PriceConfiguration
) -> Recommendation:
    verdict, reason = _verdict(rung, settings, current, price)
    return Recommendation(
        rung=rung.id,
        title=rung.title,
        verdict=verdict,
        reason=reason,
        hurts_when=rung.hurts_when,
    )


def _verdict(
    rung: Rung, settings: Settings, current: PricedConfiguration, price: PriceConfiguration
) -> tuple[str, str]:
    facts: dict[str, object] = msgspec.to_builtins(
        {**msgspec.structs.asdict(settings), **current.values}, enc_hook=str
    )
    if _is_in_use(rung, facts):
        return "in use", "these settings already have it"
    named = {k: v.get("method") if isinstance(v, dict) else v for k, v in facts.items()}
    plain = {k: v for k, v in named.items() if v is None or isinstance(v, bool | int | float | str)}
    if blocked := unmet_need(rung, plain):
        return "not now", blocked
    options = candidates_of(rung, settings, current.values)
    changes = [text for option in options if (text := _bound_change(option, current, price))]
    if changes:
        return "moves the bound", f"{rung.term}: " + "; ".join(changes)
    return "measure it", f"{rung.term}: no bound of a full step changes, so it has to be measured"


def _is_in_use(rung: Rung, facts: Mapping[str, object]) -> bool:
    """Whether the configuration has what the rung changes.

    False for weights that a method makes: the settings do not say which method made theirs.
    """
    if not rung.changes or any(ladder.MAKE in variant for variant in rung.variants):
        return False
    return all(_has(facts[name], value) for name, value in rung.changes.items())


def _has(present: object, wanted: object) -> bool:
    """Whether a setting has a value; a table of the ladder names only some fields of a record."""
    if isinstance(wanted, dict) and isinstance(present, dict):
        return wanted.items() <= present.items()
    return present == wanted


def _bound_change(
    option: RungCandidate, current: PricedConfiguration, price: PriceConfiguration
) -> str:
    """How the bounds change, or why the option cannot run; empty if they stay."""
    try:
        changed = price(option.settings)
    except UserError as error:
        return f"{option.label} cannot run ({error})"
    old, new = current.bounds, changed.bounds
    parts = []
    if _differs(old.decode_token_s, new.decode_token_s):
        parts.append(
            f"least time per token {seconds(old.decode_token_s)} ({old.slots} slots) → "
            f"{seconds(new.decode_token_s)} ({new.slots} slots)"
        )
    if _differs(old.prompt_s, new.prompt_s):
        parts.append(
            f"of a {PROMPT}-token prompt {seconds(old.prompt_s)} → {seconds(new.prompt_s)}"
        )
    return ", ".join(parts)


def _differs(old: float, new: float) -> bool:
    return abs(new / old - 1) > MIN_CHANGE
