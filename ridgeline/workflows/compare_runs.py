"""Compare two benchmark results, or two folders of repeated runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from ridgeline.errors import BadInput
from ridgeline.measure.results.aiperf import REQUESTS_FILE
from ridgeline.measure.results.comparison import MetricComparison, compare_results, load_differences
from ridgeline.measure.results.readers import read_result
from ridgeline.measure.results.result_file import RATES, LoadedResult
from ridgeline.measure.results.settings_effect import SettingsEffect, settings_effect
from ridgeline.report.result import Result

Conclusion = Literal["not regressed", "regressed", "inconclusive"]


class ResultComparison(Result, frozen=True, kw_only=True):
    """What changed from one side to the other.

    `refused`: why the sides cannot be compared, empty if they can. `changes`: settings of the
    server that differ, and `effect`: what they did, if that can be said.
    """

    refused: tuple[str, ...]
    judgements: tuple[MetricComparison, ...]
    changes: tuple[str, ...]
    effect: SettingsEffect | None

    @property
    def conclusion(self) -> Conclusion:
        """Over all metrics: one that regressed decides.

        Without one, the latencies decide where there are any: at an open load the rates are those
        of the load, whatever the server does.
        """
        if self.refused:
            return "inconclusive"
        if any(judgement.outcome == "regressed" for judgement in self.judgements):
            return "regressed"
        latencies = [one for one in self.judgements if one.metric not in RATES]
        outcomes = {judgement.outcome for judgement in latencies or self.judgements}
        return "not regressed" if outcomes & {"improved", "unchanged"} else "inconclusive"

    def to_dict(self) -> dict[str, Any]:
        """The record with its conclusion; changes of settings only with their effect."""
        body = super().to_dict() | {"conclusion": self.conclusion}
        if self.effect is None:
            del body["changes"], body["effect"]
        return body


def compare_runs(a: Path, b: Path, *, threshold: float = 0.02) -> ResultComparison:
    """Judge every metric of `b` against `a`; `threshold`: the least relative change that matters.

    Raises BadInput for a file that cannot be read.
    """
    sides = _quiet_runs(read_results(a)), _quiet_runs(read_results(b))
    refused = load_differences(*sides)
    judgements = () if refused else tuple(compare_results(*sides, threshold=threshold))
    changes = settings_changes(*sides)
    effect = settings_effect(judgements, *sides, threshold) if judgements and changes else None
    return ResultComparison(
        refused=refused, judgements=judgements, changes=tuple(changes), effect=effect
    )


def _quiet_runs(runs: list[LoadedResult]) -> list[LoadedResult]:
    """Repeated runs without those that other work disturbed, if at least two are left."""
    quiet = [run for run in runs if not run.is_busy]
    return quiet if len(quiet) >= 2 else runs


def read_results(path: Path) -> list[LoadedResult]:
    """The result of a file, or those of every run in a folder, by file name.

    A run whose event log is in the folder is read from the log and not from its result file; a
    folder that AIPerf wrote is read from its requests.
    """
    if not path.is_dir():
        return [read_result(path)]
    files = _files(path)
    if not files:
        raise BadInput("no result file in the folder", value=str(path))
    results = [read_result(file) for file in files]
    logged = {result.run for result in results if result.tool == "ridgeline"}
    return [result for result in results if result.tool == "ridgeline" or result.run not in logged]


def _files(folder: Path) -> list[Path]:
    """The result files in a folder; one per folder that AIPerf wrote, nothing hidden."""
    if (folder / REQUESTS_FILE).is_file():
        return [folder / REQUESTS_FILE]
    files = []
    for path in sorted(folder.iterdir()):
        if (path / REQUESTS_FILE).is_file():
            files.append(path / REQUESTS_FILE)
        elif path.suffix in (".json", ".jsonl", ".parquet") and not path.name.startswith("."):
            files.append(path)
    return files


def settings_changes(a: Sequence[LoadedResult], b: Sequence[LoadedResult]) -> list[str]:
    """The server's settings that differ between the two sides: `max_num_seqs 8 → 16`."""
    before, after = a[0].config, b[0].config
    both = sorted(before.keys() & after.keys())
    return [
        f"{name} {before[name]} → {after[name]}" for name in both if before[name] != after[name]
    ]
