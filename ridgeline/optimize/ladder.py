"""The rungs of the ladder as data (ladder.toml), and the candidates each makes of a configuration.

Neither this module nor the search knows a rung by name. A row says which settings it changes, what
it requires and whether it is exact; the prediction comes from simulating the changed settings and
the verdict from measuring them. A new technique joins the ladder by adding a row.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any, Literal

import msgspec

from ridgeline.config.settings import Settings, settings_from
from ridgeline.diagnose.conditions import Condition, Facts, parse
from ridgeline.errors import BadInput
from ridgeline.optimize.server_settings import (
    FLAGS,
    ServerSettings,
    flag_text,
    flags_of,
    merge_flags,
    settings_like,
)

MAKE = "make"  # key of `changes` that names the quantisation method
Honesty = Literal["exact", "lossy"]
Gate = Literal["text", "continuations", "recall"]
"""What judges a lossy rung; see ladder.toml."""


class Rung(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the ladder; the fields are described at the top of ladder.toml."""

    id: str
    title: str
    technique: str
    honesty: Honesty
    term: str
    why: str
    hurts_when: str
    risk: int
    complexity: int
    changes: dict[str, Any] = {}
    variants: tuple[dict[str, Any], ...] = ()
    needs: tuple[Condition, ...] = ()
    gate: tuple[Gate, ...] = ("text",)


DEFAULTS = Rung(
    id="defaults",
    title="The settings as shipped",
    technique="",
    honesty="exact",
    term="every performance setting that the baseline changes",
    why="A result must not be worse than no settings at all.",
    hurts_when="The baseline was tuned for this workload.",
    risk=0,
    complexity=0,
)
"""The rung that sets every performance setting to its default."""


class RankingWeights(msgspec.Struct, frozen=True, kw_only=True):
    """How much additional predicted gain one level of risk or complexity requires."""

    risk: float
    complexity: float

    def discount(self, rung: Rung) -> float:
        return 1 + self.risk * rung.risk + self.complexity * rung.complexity


class Ladder(msgspec.Struct, frozen=True):
    """`first`: ids of rungs that are tried before others that are equally certain, in order."""

    rungs: tuple[Rung, ...]
    weights: RankingWeights
    first: tuple[str, ...] = ()


class RungCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A rung applied to a configuration: the settings to try and the changes they contain.

    `make` is the method that quantises the weights first; until then `settings` stand for the
    result.
    """

    rung: Rung
    label: str
    changes: dict[str, Any]
    settings: Settings
    make: str | None = None


def defaults_candidate(defaults: Settings, incumbent: Settings) -> RungCandidate:
    """The settings as shipped, as a candidate."""
    changes = {
        name: msgspec.to_builtins(getattr(defaults, name))
        for name in Settings.__struct_fields__
        if getattr(defaults, name) != getattr(incumbent, name)
    }
    if flags_of(defaults) != flags_of(incumbent):
        changes[FLAGS] = flags_of(defaults)
    return RungCandidate(rung=DEFAULTS, label=DEFAULTS.title, changes=changes, settings=defaults)


def load_default_ladder() -> Ladder:
    """The ladder shipped with this package."""
    document = tomllib.loads(_shipped_text())
    return Ladder(_rungs(document), _weights(document["weights"]))


def parse_ladder(text: str) -> Ladder:
    """A user's ladder from TOML. Uses the default `[weights]` if it has none.

    Raises BadInput for an unknown key or setting and for a ladder without rungs.
    """
    document = tomllib.loads(text)
    if unknown := sorted(set(document) - {"rung", "weights"}):
        raise BadInput("a ladder has no such table", value=unknown[0], limit="[[rung]], [weights]")
    rungs = _rungs(document)
    if not rungs:
        raise BadInput("the ladder has no rungs", fix="write at least one [[rung]]")
    given = document.get("weights")
    return Ladder(rungs, load_default_ladder().weights if given is None else _weights(given))


def parse_rungs(text: str) -> tuple[Rung, ...]:
    """Rungs from TOML. Raises BadInput for an unknown key or setting."""
    return _rungs(tomllib.loads(text))


def _shipped_text() -> str:
    return files("ridgeline.optimize").joinpath("ladder.toml").read_text(encoding="utf-8")


def _weights(table: object) -> RankingWeights:
    try:
        return msgspec.convert(table, RankingWeights)
    except msgspec.ValidationError as error:
        raise BadInput(f"[weights] of the ladder: {error}", fix="risk and complexity") from None


def _rungs(document: Mapping[str, Any]) -> tuple[Rung, ...]:
    try:
        rows = msgspec.convert(document.get("rung", []), list[dict[str, Any]])
    except msgspec.ValidationError:
        raise BadInput("rungs must be tables", fix="begin each with [[rung]]") from None
    rungs = tuple(_rung(row) for row in rows)
    ids = [rung.id for rung in rungs]
    if len(set(ids)) < len(ids):
        raise BadInput("two rungs of the ladder have the same id", value=sorted(ids))
    return rungs


def _rung(row: dict[str, Any]) -> Rung:
    if unknown := sorted(set(row) - set(Rung.__struct_fields__)):
        raise BadInput(f"rung {row.get('id')!r} has an unknown key", value=unknown[0])
    try:
        needs = tuple(map(parse, msgspec.convert(row.get("needs", []), list[str])))
        rung = msgspec.convert({**row, "needs": ()}, Rung)
    except (msgspec.ValidationError, ValueError) as error:
        raise BadInput(f"rung {row.get('id')!r}: {error}") from None
    known = set(Settings.__struct_fields__)
    for changes in (rung.changes, *rung.variants):
        names = {setting_of(name) for name in changes}
        if unknown := sorted(names - known - {MAKE, FLAGS}):
            raise BadInput(f"rung {rung.id!r} changes an unknown setting", value=unknown[0])
        _check_values(rung, changes)
    return msgspec.structs.replace(rung, needs=needs)


def _check_values(rung: Rung, changes: Mapping[str, Any]) -> None:
    """Raise BadInput for a value its setting cannot take, before any trial starts."""
    try:
        msgspec.convert(changes.get(FLAGS, {}), dict[str, str])
    except msgspec.ValidationError:
        fix = '{ "--flag" = "value" }, and "" for a switch'
        raise BadInput(f"rung {rung.id!r}: {FLAGS} must be a table of strings", fix=fix) from None
    own = (MAKE, FLAGS)
    plain = {
        name: value
        for name, value in changes.items()
        if name not in own and not _is_relative(value) and "." not in name
    }
    settings_from(plain, where=f"rung {rung.id!r}")


def unmet_need(rung: Rung, facts: Facts) -> str | None:
    """Why the rung does not apply to this configuration, or None. Unknown facts exclude nothing."""
    failed = [need.explain(facts) for need in rung.needs if need.holds(facts) is False]
    return "needs " + "; ".join(failed) if failed else None


def candidates_of(
    rung: Rung, incumbent: Settings, resolved: Mapping[str, object]
) -> Iterator[RungCandidate]:
    """Every variant of a rung that changes something.

    `resolved`: the values in effect, by setting.
    """
    for variant in rung.variants or ({},):
        combined = {**rung.changes, **variant}
        make, flags = combined.pop(MAKE, None), combined.pop(FLAGS, {})
        if flags and not isinstance(incumbent, ServerSettings):
            continue
        changes = {
            setting_of(name): _changed(name, change, incumbent, resolved)
            for name, change in combined.items()
        }
        changes = {k: v for k, v in changes.items() if v != resolved.get(k, getattr(incumbent, k))}
        merged = merge_flags(flags_of(incumbent), flags)
        if flags and merged != flags_of(incumbent):
            changes[FLAGS] = merged
        if changes:
            values = {**msgspec.to_builtins(incumbent), **msgspec.to_builtins(changes)}
            settings = settings_like(incumbent, values)
            label = _label(rung, variant, {**changes, MAKE: make})
            yield RungCandidate(
                rung=rung, label=label, changes=changes, settings=settings, make=make
            )


def setting_of(name: str) -> str:
    """The setting that a key of a rung's changes belongs to: `speculative_config.model` changes
    one value of `speculative_config`."""
    return name.partition(".")[0]


def _changed(
    name: str, change: object, incumbent: Settings, resolved: Mapping[str, object]
) -> object:
    """The value of a setting after a change of it, or of one of its values."""
    setting, _, key = name.partition(".")
    whole = getattr(incumbent, setting)
    if not key:
        return _value(change, resolved.get(setting, whole))
    if not isinstance(whole, msgspec.Struct):
        return resolved.get(setting, whole)  # not set; `needs` should exclude this
    changed = _value(change, getattr(whole, key))
    if changed == getattr(whole, key):
        return resolved.get(setting, whole)
    return msgspec.structs.replace(whole, **{key: changed})


def _value(change: object, current: object) -> object:
    """The new value of a setting, given its current one."""
    if not _is_relative(change):
        return change
    assert isinstance(change, dict)
    if change.get("unset"):
        return None
    if isinstance(current, bool) or not isinstance(current, int | float):
        return current  # no multiple of a missing value; `needs` should exclude this
    value = current * change["times"]
    value = min(max(value, change.get("min", value)), change.get("max", value))
    return round(value) if isinstance(current, int) else value


def _is_relative(change: object) -> bool:
    """Whether the change is computed from the current value."""
    return isinstance(change, dict) and bool({"times", "unset"} & change.keys())


def _label(rung: Rung, variant: dict[str, Any], changes: dict[str, Any]) -> str:
    shown = [
        str(changes[name]) if name == MAKE else _assigned(name, changes[name])
        for name in variant
        if name in changes and name != FLAGS
    ]
    for name in variant:
        setting, _, key = name.partition(".")
        if key and setting in changes:
            shown.append(f"{key}={getattr(changes[setting], key)}")
    if FLAGS in changes:
        shown.append(flag_text(variant.get(FLAGS, {}).items()))
    shown = [text for text in shown if text]
    return f"{rung.title} ({', '.join(shown)})" if shown else rung.title


def _assigned(name: str, value: object) -> str:
    """A setting and its value, of a table each of its keys."""
    if isinstance(value, dict):
        return ", ".join(f"{key}={part}" for key, part in value.items())
    return f"{name}={value}"
