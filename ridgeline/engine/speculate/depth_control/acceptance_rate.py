"""Probability that a draft's i-th token is accepted given that those before it were.

Counts decay: slowly over all sequences, for one sequence with every verdict and also while it is
not drafted for, so that a sequence that was hard to predict is tried again. A sequence with few
verdicts is assumed to resemble the others.
"""

from __future__ import annotations

from collections.abc import Sequence

_PRIOR, _PRIOR_WEIGHT = 0.6, 2.0  # of all, before anything is known
_LIKE_OTHERS = 3.0  # verdicts that the others' experience counts for
_FADE_ALL, _FADE_OWN, _FADE_IDLE = 0.97, 0.85, 0.98
_LARGEST_UNIT = 1e9


class _Counts:
    """`unit`: the weight of a new verdict. It grows, so that older ones count less."""

    __slots__ = ("kept", "tried", "unit")

    def __init__(self) -> None:
        self.tried: list[float] = []
        self.kept: list[float] = []
        self.unit = 1.0

    def note(self, num_drafted: int, num_accepted: int, fade: float) -> None:
        """Positions up to the first rejection were tried; those before it were accepted."""
        self.fade(fade)
        num_tried = min(num_drafted, num_accepted + 1)
        self.tried += [0.0] * (num_tried - len(self.tried))
        self.kept += [0.0] * (num_tried - len(self.kept))
        for place in range(num_tried):
            self.tried[place] += self.unit
        for place in range(min(num_tried, num_accepted)):
            self.kept[place] += self.unit

    def fade(self, factor: float) -> None:
        self.unit /= factor
        if self.unit > _LARGEST_UNIT:
            self.tried = [x / self.unit for x in self.tried]
            self.kept = [x / self.unit for x in self.kept]
            self.unit = 1.0

    def rate(self, place: int, like: float, weight: float) -> float:
        if place >= len(self.tried):
            return like
        weight *= self.unit
        return (self.kept[place] + weight * like) / (self.tried[place] + weight)


class AcceptanceRates:
    """Acceptance by position, per sequence and over all. `prior`: assumed before anything is
    learnt.
    """

    def __init__(self, prior: float = _PRIOR) -> None:
        self._prior = prior
        self._all = _Counts()
        self._own: dict[int, _Counts] = {}
        self._rates: list[float] = []  # as far as they were asked for since something was learnt

    def learn(self, seq_id: int, num_drafted: int, num_accepted: int) -> None:
        self._all.note(num_drafted, num_accepted, _FADE_ALL)
        self._rates = []
        self._own.setdefault(seq_id, _Counts()).note(num_drafted, num_accepted, _FADE_OWN)

    def idle(self, seq_id: int) -> None:
        """The sequence was not drafted for in this step."""
        own = self._own.get(seq_id)
        if own is not None:
            own.fade(_FADE_IDLE)

    def forget(self, seq_id: int) -> None:
        self._own.pop(seq_id, None)

    def rates(self, depth: int) -> list[float]:
        """Over all sequences: the acceptance of each position given those before it."""
        found = self._rates
        like = found[-1] if found else self._prior
        for place in range(len(found), depth):
            like = self._all.rate(place, like, _PRIOR_WEIGHT)
            found.append(like)
        return found[:depth]

    def survivals(self, seq_id: int, rates: Sequence[float], least: float = 0.0) -> list[float]:
        """Probability that the first 1, 2, … drafts of a sequence are all accepted, while at least
        `least`.
        """
        own, found, alive = self._own.get(seq_id), [], 1.0
        for place, like in enumerate(rates):
            alive *= like if own is None else own.rate(place, like, _LIKE_OTHERS)
            if alive < least:
                break
            found.append(alive)
        return found
