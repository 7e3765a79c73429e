"""Why each technique is or is not for this model on this machine, before anything is run.

For every row of the ladder: what it needs and whether these settings give it, and how the
roofline's own bounds would move: the least time of one token in a full decode step, and of a
512-token prompt. The bounds are arithmetic, not a forecast: what the engine adds to them is what
`ridgeline optimize` measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from ridgeline.config.settings import Settings
from ridgeline.diagnose.conditions import seconds
from ridgeline.errors import UserError
from ridgeline.modelspec.cost import decode_work, prefill_work
from ridgeline.modelspec.model import ModelSpec
from ridgeline.optimize import ladder
from ridgeline.optimize.ladder import Rung, RungCandidate, candidates_of, unmet_need
from ridgeline.roofline import Peaks, bound

CONTEXT = 512
PROMPT = 512
SAME = 0.02  # bounds nearer than this are called the same


class StaticBounds(msgspec.Struct, frozen=True, kw_only=True):
    """The least seconds: of a decode step with every seat taken, per token; and of one prompt."""

    decode_token_s: float
    prompt_s: float
    seats: int


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """One technique: `verdict`: in use, not now, moves the bound, or measure it."""

    rung: str
    title: str
    verdict: str
    reason: str
    hurts_when: str


class Here(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration, priced: its resolved values, its spec, the ceilings of this machine."""

    values: dict[str, object]
    spec: ModelSpec
    peaks: Peaks

    @property
    def bounds(self) -> StaticBounds:
        seats = int(str(self.values["max_num_seqs"]))
        decode, prefill = decode_work(self.spec, seats, CONTEXT), prefill_work(self.spec, PROMPT)
        return StaticBounds(
            decode_token_s=bound(decode, self.peaks).seconds / seats,
            prompt_s=bound(prefill, self.peaks).seconds,
            seats=seats,
        )


PriceIt = Callable[[Settings], Here]


def recommendations(settings: Settings, price: PriceIt) -> Iterator[Recommendation]:
    """One per rung of the shipped ladder, in its order."""
    here = price(settings)
    for rung in ladder.load_default_ladder().rungs:
        yield _recommendation(rung, settings, here, price)


def _recommendation(rung: Rung, settings: Settings, here: Here, price: PriceIt) -> Recommendation:
    verdict, reason = _judged(rung, settings, here, price)
    return Recommendation(
        rung=rung.id,
        title=rung.title,
        verdict=verdict,
        reason=reason,
        hurts_when=rung.hurts_when,
    )


def _judged(rung: Rung, settings: Settings, here: Here, price: PriceIt) -> tuple[str, str]:
    facts = {**msgspec.structs.asdict(settings), **here.values}
    if rung.changes and all(facts[name] == value for name, value in rung.changes.items()):
        return "in use", "these settings have it already"
    plain = {k: v for k, v in facts.items() if v is None or isinstance(v, bool | int | float | str)}
    if blocked := unmet_need(rung, plain):
        return "not now", blocked
    options = candidates_of(rung, settings, here.values)
    moved = [text for option in options if (text := _moved(option, here, price))]
    if moved:
        return "moves the bound", f"{rung.term}: " + "; ".join(moved)
    return "measure it", f"{rung.term}: no bound of a full step moves, only measuring tells"


def _moved(option: RungCandidate, here: Here, price: PriceIt) -> str:
    """How the bounds change, or why the option cannot run; empty where they stay."""
    try:
        there = price(option.settings)
    except UserError as error:
        return f"{option.label} cannot run ({error})"
    old, new = here.bounds, there.bounds
    parts = []
    if _differs(old.decode_token_s, new.decode_token_s):
        parts.append(
            f"least time per token {seconds(old.decode_token_s)} ({old.seats} seats) → "
            f"{seconds(new.decode_token_s)} ({new.seats} seats)"
        )
    if _differs(old.prompt_s, new.prompt_s):
        parts.append(
            f"of a {PROMPT}-token prompt {seconds(old.prompt_s)} → {seconds(new.prompt_s)}"
        )
    return ", ".join(parts)


def _differs(old: float, new: float) -> bool:
    return abs(new / old - 1) > SAME
