"""`ridgeline compare A B`: what changed between two results, in one sentence per metric.

Exit code 0: nothing regressed. 1: something did. 3: it cannot be said, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.tools import CompareOptions
from ridgeline.errors import BadInput
from ridgeline.measure.results.aiperf import REQUESTS_FILE
from ridgeline.measure.results.comparison import MetricComparison, compare_results, load_differences
from ridgeline.measure.results.readers import read_result
from ridgeline.measure.results.result_file import LoadedResult
from ridgeline.measure.results.settings_effect import SettingsEffect, settings_effect
from ridgeline.report.json_line import json_line

REGRESSED, INCONCLUSIVE = 1, 3
_STYLES = {"improved": "green", "regressed": "red", "inconclusive": "yellow", "unchanged": ""}


def compare(call: Invocation) -> int:
    """`ridgeline compare`."""
    options = call.read(CompareOptions)
    return command(options.a, options.b, options.threshold / 100, options.json)


def command(
    a: Path, b: Path, threshold: float, as_json: bool, console: Console | None = None
) -> int:
    """Print the judgements; the exit code. Raises BadInput for what cannot be read."""
    sides = results(a), results(b)
    refused = load_differences(*sides)
    found = () if refused else compare_results(*sides, threshold=threshold)
    code = _code(found, refused)
    changed = changes(*sides)
    effect = settings_effect(found, *sides, threshold) if found and changed else None
    if as_json:
        body = {"refused": refused, "judgements": found, "exit_code": code}
        if effect is not None:
            body |= {"changes": changed, "effect": effect}
        print(json_line(body))
        return code
    out = console or Console(highlight=False, soft_wrap=True)
    for reason in refused:
        out.print(f"inconclusive: {reason}", style="yellow", markup=False)
    for each in found:
        out.print(str(each), style=_STYLES[each.outcome], markup=False)
    if effect is not None:
        out.print(effect_line(effect, changed), style=_STYLES[effect.outcome], markup=False)
    if not (found or refused):
        out.print("inconclusive: the two have no metric in common", style="yellow")
    return code


def effect_line(effect: SettingsEffect, changed: Sequence[str]) -> str:
    """What a change of settings did, where that can be said."""
    what = "; ".join(changed)
    if effect.outcome == "unchanged":
        return f"this change had no effect: {what} ({effect.sentence})"
    if effect.outcome != "inconclusive":
        return f"this change had an effect: {what} ({effect.sentence})"
    return f"inconclusive whether this change had an effect: {what} ({effect.sentence})"


def results(path: Path) -> list[LoadedResult]:
    """The result of a file, or of every run in a folder (repeated runs), by name: of a run whose
    log is there, the log and not its result file too; of a folder that AIPerf wrote, its requests.
    """
    if not path.is_dir():
        return [read_result(path)]
    files = _files(path)
    if not files:
        raise BadInput("no result file in the folder", value=str(path))
    found = [read_result(each) for each in files]
    logged = {each.run for each in found if each.tool == "ridgeline"}
    return [each for each in found if each.tool == "ridgeline" or each.run not in logged]


def _files(folder: Path) -> list[Path]:
    """Of AIPerf's folder the one file that tells most, of others all results, and of what they
    hold of AIPerf's folders each one's; nothing hidden."""
    if (folder / REQUESTS_FILE).is_file():
        return [folder / REQUESTS_FILE]
    found = []
    for each in sorted(folder.iterdir()):
        if (each / REQUESTS_FILE).is_file():
            found.append(each / REQUESTS_FILE)
        elif each.suffix in (".json", ".jsonl", ".parquet") and not each.name.startswith("."):
            found.append(each)
    return found


def changes(a: Sequence[LoadedResult], b: Sequence[LoadedResult]) -> list[str]:
    """Settings of the server that differ between the two sides."""
    before, after = a[0].config, b[0].config
    both = sorted(before.keys() & after.keys())
    return [
        f"{name} {before[name]} → {after[name]}" for name in both if before[name] != after[name]
    ]


def _code(found: Sequence[MetricComparison], refused: Sequence[str]) -> int:
    outcomes = {each.outcome for each in found}
    if refused or not found:
        return INCONCLUSIVE
    if "regressed" in outcomes:
        return REGRESSED
    decided = outcomes & {"improved", "unchanged"}
    return 0 if decided else INCONCLUSIVE
