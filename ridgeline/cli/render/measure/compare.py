"""A comparison of two results: one sentence per metric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from ridgeline.workflows.compare_runs import ResultComparison

if TYPE_CHECKING:
    from ridgeline.measure.results.settings_effect import SettingsEffect

_STYLES = {"improved": "green", "regressed": "red", "inconclusive": "yellow", "unchanged": ""}


def print_comparison(comparison: ResultComparison, console: Console) -> None:
    for reason in comparison.refused:
        console.print(f"inconclusive: {reason}", style="yellow", markup=False)
    for judgement in comparison.judgements:
        console.print(str(judgement), style=_STYLES[judgement.outcome], markup=False)
    effect = comparison.effect
    if effect is not None:
        line = effect_line(effect, comparison.changes)
        console.print(line, style=_STYLES[effect.outcome], markup=False)
    if not (comparison.judgements or comparison.refused):
        console.print("inconclusive: the two have no metric in common", style="yellow")


def effect_line(effect: SettingsEffect, changes: Sequence[str]) -> str:
    """What a change of the server's settings did."""
    what = "; ".join(changes)
    if effect.outcome == "unchanged":
        return f"this change had no effect: {what} ({effect.sentence})"
    if effect.outcome != "inconclusive":
        return f"this change had an effect: {what} ({effect.sentence})"
    return f"inconclusive whether this change had an effect: {what} ({effect.sentence})"
