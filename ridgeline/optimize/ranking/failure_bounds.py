"""Values that crashed a server or did not fit, so that nothing as large is tried again.

A configuration that ran out of memory says more than that it failed: whatever asks for at least as
much of everything will fail as well. So each failure is kept as the numbers that the trial raised,
and a candidate whose numbers are all at least as large is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ridgeline.config.settings import Settings
from ridgeline.optimize.server_settings import flags_of

Numbers = Mapping[str, float]


def numbers_of(settings: Settings) -> dict[str, float]:
    """The numeric settings and flags of a configuration, by name."""
    values = {name: getattr(settings, name) for name in Settings.__struct_fields__}
    numbers = {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    for flag, value in flags_of(settings):
        try:
            numbers[flag] = float(value)
        except ValueError:
            continue
    return numbers


class FailureBounds:
    """What failed trials taught about how large settings may be."""

    def __init__(self) -> None:
        self._failed: list[tuple[Numbers, frozenset[object]]] = []
        self._learnt: list[tuple[Settings, Settings]] = []

    @property
    def learnt(self) -> tuple[tuple[Settings, Settings], ...]:
        """The failures so far, as (settings that failed, incumbent of that time)."""
        return tuple(self._learnt)

    def restore(self, learnt: Sequence[tuple[Settings, Settings]]) -> None:
        """Continue with the failures of an interrupted search."""
        for settings, incumbent in learnt:
            self.learn(settings, incumbent)

    def learn(self, settings: Settings, incumbent: Settings) -> None:
        """Record that `settings` did not start or crashed, while `incumbent` runs.

        Numbers that the incumbent does not have, such as a flag's own default, count as raised. A
        trial that raised no number teaches nothing about numbers.
        """
        self._learnt.append((settings, incumbent))
        before, after = numbers_of(incumbent), numbers_of(settings)
        raised = {name: value for name, value in after.items() if value > before.get(name, 0.0)}
        if raised:
            self._failed.append((raised, _switches(settings)))

    def excludes(self, settings: Settings) -> str | None:
        """Why the settings would fail as an earlier trial did; None if nothing says so."""
        numbers, switches = numbers_of(settings), _switches(settings)
        for failed, other_switches in self._failed:
            if switches == other_switches and all(
                numbers.get(name, 0.0) >= value for name, value in failed.items()
            ):
                shown = ", ".join(f"{name}={value:g}" for name, value in failed.items())
                return f"as large as a trial that failed ({shown})"
        return None


def _switches(settings: Settings) -> frozenset[object]:
    """Everything that is not a number: a format that saves memory may make the same number fit."""
    numbers = numbers_of(settings)
    fields = {
        (name, repr(getattr(settings, name)))
        for name in Settings.__struct_fields__
        if name not in numbers
    }
    flags = {pair for pair in flags_of(settings) if pair[0] not in numbers}
    return frozenset(fields | flags)
