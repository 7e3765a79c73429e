"""Settings that interact, searched together in the simulator, for one trial to measure.

Slots, token budget, memory share and parallelism trade against each other: raising one alone may
gain nothing although raising two does, and a trial per rung spends the budget on steps of the way.
So the rungs that may gain span a space, one dimension each:

  a number     every value between the smallest and the largest variant and the present one
  a choice     one of the rung's variants, or none: switches, and flags with whole numbers, of which
               a server may take only some (block sizes, parallel sizes)

Optuna's TPE sampler draws points of it, the simulator scores them, and the best one becomes a
candidate like any other: its tokens are checked, its quality is judged if a part of it is lossy,
and it is measured against the incumbent in paired rounds. Parts that add nothing to it are dropped
first. Points beyond what failed trials showed to be possible (`FailureBounds`) are not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput
from ridgeline.optimize.comparison.outcome import MIN_GAIN
from ridgeline.optimize.ladder import Rung, RungCandidate
from ridgeline.optimize.server_settings import (
    FLAGS,
    flag_text,
    flags_of,
    merge_flags,
    settings_like,
)

if TYPE_CHECKING:
    import optuna

MAX_POINTS = 14  # simulated in one search
PATIENCE = 6  # points without a better one that end it
STARTUP_POINTS = 4  # before the sampler fits
MIN_PART = 0.01  # a part of the best point that gains less is dropped
LOG_SCALE = 4.0  # numbers whose range is wider are drawn by their logarithm
JOINT, JOINT_LOSSY = "joint", "joint-lossy"

Change = Mapping[str, Any]
"""Setting → value, and flag → text (a name that begins with a dash)."""

Score = Callable[[Settings], float | None]
"""The simulated objective of settings; None if they cannot run or must not be tried."""


class Dimension(msgspec.Struct, frozen=True, kw_only=True):
    """What one rung may change: one of `changes`, which have `labels`.

    `number`: the name of the only value that its variants change, if it is a number; `low` and
    `high` limit it, and `present` is its value now (None: unknown).
    """

    rung: Rung
    labels: tuple[str, ...]
    changes: tuple[Change, ...]
    number: str | None = None
    low: float = 0.0
    high: float = 0.0
    present: float | None = None

    @property
    def is_integer(self) -> bool:
        """Whether the number is one."""
        assert self.number is not None
        return all(isinstance(_number(change[self.number]), int) for change in self.changes)

    def draw(self, trial: optuna.trial.BaseTrial) -> Change:
        """A change, drawn by the sampler; empty for none."""
        if self.number is None:
            index = trial.suggest_categorical(self.rung.id, list(range(-1, len(self.changes))))
            return {} if index < 0 else self.changes[index]
        is_log = self.high >= LOG_SCALE * self.low > 0
        if self.is_integer:
            drawn = trial.suggest_int(self.rung.id, int(self.low), int(self.high), log=is_log)
            return {} if drawn == self.present else {self.number: self._like(_tidy(drawn))}
        drawn_float = trial.suggest_float(self.rung.id, self.low, self.high, log=is_log)
        return {self.number: self._like(round(drawn_float, 2))}

    def change_of(self, candidate: RungCandidate) -> Change:
        """The change that one of the rung's candidates makes."""
        return self.changes[self.labels.index(candidate.label)]

    def parameter(self, change: Change | None) -> float | int:
        """The sampler's parameter for one of the rung's changes (None: the present state)."""
        if self.number is None:
            return -1 if change is None else self.changes.index(change)
        value = self.present if change is None else _number(change[self.number])
        value = self.low if value is None else min(max(value, self.low), self.high)
        return int(value) if self.is_integer else value

    def _like(self, value: float | int) -> Any:
        assert self.number is not None
        return f"{value:g}" if self.number.startswith("-") else value


class JointPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A change per rung, and the settings and the simulated score of all of them together."""

    parts: tuple[tuple[Dimension, Change], ...]
    settings: Settings
    score: float


def dimension_of(rung: Rung, options: Sequence[RungCandidate], incumbent: Settings) -> Dimension:
    """The dimension that a rung's variants span around the incumbent."""
    present, labels = dict(flags_of(incumbent)), tuple(option.label for option in options)
    changes = []
    for option in options:
        change = {name: value for name, value in option.changes.items() if name != FLAGS}
        for flag, text in option.changes.get(FLAGS, ()):
            if present.get(flag) != text:
                change[flag] = text
        changes.append(change)
    names = {name for change in changes for name in change}
    if len(names) != 1 or any(_number(value) is None for c in changes for value in c.values()):
        return Dimension(rung=rung, labels=labels, changes=tuple(changes))
    [name] = names
    if name.startswith("-") and all(isinstance(_number(c[name]), int) for c in changes):
        return Dimension(rung=rung, labels=labels, changes=tuple(changes))
    now = present.get(name) if name.startswith("-") else getattr(incumbent, name)
    now = _number(now)
    values = [float(_number(change[name]) or 0) for change in changes]
    limits = values if now is None else [*values, float(now)]
    return Dimension(
        rung=rung,
        labels=labels,
        changes=tuple(changes),
        number=name,
        low=min(limits),
        high=max(limits),
        present=now,
    )


class JointSearch:
    """Searches the space of some dimensions around an incumbent."""

    def __init__(
        self, dimensions: Sequence[Dimension], incumbent: Settings, score: Score, *, seed: int
    ) -> None:
        # Switches first: where two rungs change the same number, the one that is drawn counts.
        self._dimensions = sorted(dimensions, key=lambda dimension: dimension.number is not None)
        self._incumbent, self._score, self._seed = incumbent, score, seed

    def best(
        self, first: Sequence[Mapping[str, Change]], may_go_on: Callable[[], bool]
    ) -> JointPoint | None:
        """The best point, without parts that add nothing.

        `first`: points to begin with, as rung id → one of its changes. Ends when `may_go_on` is
        false.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(
            seed=self._seed, n_startup_trials=STARTUP_POINTS + len(first)
        )
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for point in first:
            study.enqueue_trial(
                {d.rung.id: d.parameter(point.get(d.rung.id)) for d in self._dimensions}
            )
        best: JointPoint | None = None
        since_best = 0
        for _ in range(MAX_POINTS):
            if since_best >= PATIENCE or not may_go_on():
                break
            trial = study.ask()
            parts = [(dimension, dimension.draw(trial)) for dimension in self._dimensions]
            drawn = self._point([(dimension, change) for dimension, change in parts if change])
            if drawn is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
                continue
            study.tell(trial, drawn.score)
            since_best += 1
            if best is None or drawn.score > best.score:
                best, since_best = drawn, 0
        return None if best is None else self._without_idle_parts(best)

    def only(self, point: JointPoint, honesty: str) -> JointPoint | None:
        """The point without the parts of rungs of another honesty."""
        kept = [(d, change) for d, change in point.parts if d.rung.honesty == honesty]
        return point if len(kept) == len(point.parts) else self._point(kept)

    def _point(self, parts: Sequence[tuple[Dimension, Change]]) -> JointPoint | None:
        settings = self._settings(parts)
        score = None if settings is None else self._score(settings)
        if settings is None or score is None:
            return None
        return JointPoint(parts=tuple(parts), settings=settings, score=score)

    def _settings(self, parts: Sequence[tuple[Dimension, Change]]) -> Settings | None:
        values, flags = dict(msgspec.to_builtins(self._incumbent)), {}
        for _, change in parts:
            for name, value in change.items():
                if name in values:
                    values[name] = value
                else:
                    flags[name] = value
        if flags:
            values[FLAGS] = merge_flags(flags_of(self._incumbent), flags)
        try:
            return settings_like(self._incumbent, values)
        except BadInput:
            return None  # two rungs whose changes exclude each other

    def _without_idle_parts(self, point: JointPoint) -> JointPoint:
        """Drop the parts without which the score stays, the latest ones first."""
        for part in reversed(point.parts):
            rest = self._point([other for other in point.parts if other is not part])
            if rest is not None and rest.score >= (1 - MIN_PART) * point.score:
                point = msgspec.structs.replace(rest, score=max(rest.score, point.score))
        return point


def joint_candidate(point: JointPoint, incumbent: Settings) -> RungCandidate:
    """The point as a candidate of the ladder."""
    rungs = [dimension.rung for dimension, _ in point.parts]
    is_lossy = any(rung.honesty == "lossy" for rung in rungs)
    changes = {
        name: value
        for _, change in point.parts
        for name, value in change.items()
        if name in Settings.__struct_fields__
    }
    if flags_of(point.settings) != flags_of(incumbent):
        changes[FLAGS] = flags_of(point.settings)
    shown = [f"{name}={value}" for name, value in changes.items() if name != FLAGS]
    new_flags = set(flags_of(point.settings)) - set(flags_of(incumbent))
    shown += [flag_text([pair]) for pair in sorted(new_flags)]
    rung = Rung(
        id=JOINT_LOSSY if is_lossy else JOINT,
        title="Several settings together",
        technique="",
        honesty="lossy" if is_lossy else "exact",
        term="; ".join(dict.fromkeys(rung.term for rung in rungs)),
        why="They interact: the simulator finds more in all of them together than in any alone.",
        hurts_when="The simulator is wrong about one of them, which a separate trial would show.",
        risk=max(rung.risk for rung in rungs),
        complexity=max(rung.complexity for rung in rungs),
        gate=tuple(dict.fromkeys(name for rung in rungs for name in rung.gate)),
    )
    return RungCandidate(
        rung=rung,
        label=f"{rung.title} ({', '.join(shown)})",
        changes=changes,
        settings=point.settings,
    )


def is_worth_a_trial(point: JointPoint, best_single: float) -> bool:
    """Whether several parts together gain more than the best rung alone."""
    return len(point.parts) > 1 and point.score > (1 + MIN_GAIN) * best_single


def _tidy(value: int) -> int:
    """A number near it that has four significant binary digits."""
    unit = 1 << max(0, value.bit_length() - 4)
    return max(1, round(value / unit) * unit)


def _number(value: object) -> int | float | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return value
    try:
        number = float(str(value))
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return int(number) if str(value).lstrip("-").isdigit() else number
