"""Which known family an unknown config resembles most, for the error that refuses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.modelspec.families.config_fields import FIXED, HARMLESS
from ridgeline.modelspec.families.family import Family

_SHOWN = 12


def nearest_family(
    config: Mapping[str, Any], families: Mapping[str, Family]
) -> tuple[str, tuple[str, ...]]:
    """The family that understands most fields of `config`, and the fields that it does not.

    Of two that understand as many, the one that reads the fewest other fields.
    """
    fields = {key for key in config if key not in HARMLESS and key not in FIXED}

    def distance(name: str) -> tuple[int, int]:
        known = families[name].understood | families[name].fixed.keys()
        return len(fields - known), len(known - fields)

    name = min(families, key=distance)
    row = families[name]
    return name, tuple(sorted(fields - row.understood - row.fixed.keys()))


def describe_nearest(config: Mapping[str, Any], families: Mapping[str, Family]) -> str:
    """The nearest family and the fields that differ, in words."""
    text = config.get("text_config")
    name, unknown = nearest_family(text if isinstance(text, dict) else config, families)
    if not unknown:
        return f"nearest known: {name}, whose fields it has"
    more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
    return f"nearest known: {name}, which has no {', '.join(unknown[:_SHOWN])}{more}"
