"""Writes ridgeline.toml: the settings found, each with the rung it comes from.

`ridgeline serve --config` reads only the `[engine]` table; `[provenance]` records the conditions
under which the settings were found.
"""

from __future__ import annotations

import json

import msgspec

from ridgeline.config.settings import Settings, changed
from ridgeline.hub.download import pinned_name
from ridgeline.optimize.output.headline import headline
from ridgeline.optimize.result import LadderResult
from ridgeline.optimize.server_settings import recorded_settings


def final_settings(result: LadderResult) -> Settings:
    return recorded_settings(result.final.settings)


def ridgeline_toml(result: LadderResult) -> str:
    """The content of the file."""
    provenance = result.provenance
    lines = [
        f"# Written by `ridgeline optimize` {provenance.version} on {provenance.started}.",
        f"# {headline(result)}",
        "# ridgeline serve --config ridgeline.toml",
        "",
        "[engine]",
        *_engine_lines(result),
        "",
        "[provenance]",
        *(f"{name} = {_value(value)}" for name, value in _provenance(result).items()),
    ]
    return "\n".join(lines) + "\n"


def _engine_lines(result: LadderResult) -> list[str]:
    """What differs from the defaults, each with the rung that set it or as the baseline had it."""
    settings = final_settings(result)
    why = dict.fromkeys(result.baseline.settings.keys() - {"model"}, "as in the baseline")
    why |= {name: trial.label for trial in result.kept for name in trial.changes}
    named = {"model": "", **changed(settings)} | {"model": pinned_name(settings.model)}
    return [
        f"{name} = {_value(value)}" + (f"  # {why[name]}" if name in why else "")
        for name, value in named.items()
        if value is not None
    ]


def _provenance(result: LadderResult) -> dict[str, object]:
    provenance = result.provenance
    return {
        "workload": provenance.workload,
        "slo": provenance.slo,
        "objective": provenance.objective,
        "goodput_before_req_s": round(result.baseline.measured.goodput_req_s, 4),
        "goodput_after_req_s": round(result.final.measured.goodput_req_s, 4),
        "slo_holds": result.slo_holds,
        "seed": provenance.seed,
        "started": provenance.started,
    }


def _value(value: object) -> str:
    """A plain value as TOML; a table on one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(each)}" for key, each in value.items()) + " }"
    if isinstance(value, float) and value == int(value):
        return f"{value:.1f}"
    return json.dumps(value, ensure_ascii=False)


def ladder_json(result: LadderResult) -> str:
    """The complete result as JSON."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"
