"""The state of a search on disk, written after the baseline and after every trial.

An interrupted search continues from it: with the same trials, incumbent, seeds, prediction errors
and time spent. Only the open servers are lost, and are started again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.config.settings import Settings
from ridgeline.errors import DECODE_ERRORS, BadInput
from ridgeline.optimize.comparison.objective import JudgedRun
from ridgeline.optimize.job import OptimizeJob, RunningConfiguration
from ridgeline.optimize.quality.text_comparison import Array
from ridgeline.optimize.ranking.predictor import PredictorState
from ridgeline.optimize.result import Trial
from ridgeline.optimize.time_budget import BudgetState
from ridgeline.records import EngineInfo, RunTrace

STATE_FILE = "search.json"


class SavedConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """A measured configuration without its server."""

    label: str
    settings: dict[str, Any]
    info: EngineInfo
    rate: float
    runs: tuple[JudgedRun, ...]
    settled: bool

    @classmethod
    def of(cls, configuration: RunningConfiguration) -> SavedConfiguration:
        return cls(
            label=configuration.label,
            settings=msgspec.to_builtins(configuration.settings),
            info=configuration.deployment.info,
            rate=configuration.rate,
            runs=configuration.runs,
            settled=configuration.settled,
        )


class SavedSearch(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a search has learnt. `request` describes the job that it belongs to.

    `failures`: settings that did not start or crashed, each with the incumbent of that time.
    """

    request: dict[str, Any]
    baseline: SavedConfiguration
    incumbent: SavedConfiguration
    trials: tuple[Trial, ...]
    tried: tuple[tuple[dict[str, Any], str | None], ...]
    predictor: PredictorState
    budget: BudgetState
    seed: int
    spread: tuple[tuple[float, int], ...] = ()
    user_scores: tuple[float, ...] = ()
    failures: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = ()


class StateFile:
    """Reads and writes the state of one search in a folder."""

    def __init__(self, folder: Path, *, resume: bool = False) -> None:
        self._path, self._resume = folder / STATE_FILE, resume

    def load(self, job: OptimizeJob) -> SavedSearch | None:
        """The state to continue from; None for a new search.

        Raises BadInput if there is none, it cannot be read, or it belongs to another request.
        """
        if not self._resume:
            return None
        try:
            saved = msgspec.json.decode(self._path.read_bytes(), type=SavedSearch)
        except (OSError, *DECODE_ERRORS) as error:
            raise BadInput(
                "there is no search to resume", value=str(self._path), fix=str(error)
            ) from None
        request = request_of(job)
        for name, value in request.items():
            if saved.request.get(name) != value:
                raise BadInput(
                    f"the search to resume had another {name}",
                    value=str(value),
                    limit=str(saved.request.get(name)),
                    fix="give the options of the first call; only --budget may differ",
                )
        return saved

    def save(self, saved: SavedSearch) -> None:
        """Replace the file; a reader sees the old state or the new one."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(saved))
        part.replace(self._path)


def request_of(job: OptimizeJob) -> dict[str, Any]:
    """What must be equal for a search to continue: all of the job but its budget."""
    return {
        "workload": job.workload,
        "SLO": str(job.slo),
        "objective": job.objective,
        "seed": job.seed,
        # As JSON, like the saved one: a tuple would differ from the list that it was saved as.
        "command line or settings": msgspec.json.decode(msgspec.json.encode(job.settings)),
    }


def saved_settings(values: dict[str, Any], job: OptimizeJob) -> Settings:
    """Settings of the kind of the job's, from their plain values."""
    return msgspec.convert(values, type(job.settings))


class ClosedDeployment:
    """A configuration that was measured earlier and is not up."""

    def __init__(self, info: EngineInfo) -> None:
        self.info = info

    async def run(self, load: object, on_finish: object = None) -> RunTrace:
        raise AssertionError("it is opened again before it is measured")

    async def greedy(
        self, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[tuple[int, ...]]:
        raise AssertionError("it is opened again before it is measured")

    def margin(self, prompt: Sequence[int], output: Sequence[int], place: int) -> float:
        raise AssertionError("it is opened again before it is measured")

    def margin_variation(self) -> float:
        raise AssertionError("it is opened again before it is measured")

    def logprobs_of(self, tokens: Sequence[int]) -> Array:
        raise AssertionError("it is opened again before it is measured")
