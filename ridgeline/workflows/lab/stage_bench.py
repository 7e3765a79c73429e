"""Opens and measures the stages of a case study: all open at once if the memory allows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from ridgeline.config.settings import Settings
from ridgeline.engine.config import resolve
from ridgeline.errors import RidgelineError
from ridgeline.hardware import system
from ridgeline.modelspec.cost import resident_weight_bytes
from ridgeline.optimize.quality import Array
from ridgeline.report.json_line import plain
from ridgeline.workflows.lab.case_study import StageResult
from ridgeline.workflows.lab.open_stage import OpenStage, Outputs, StageWork
from ridgeline.workflows.lab.study_stages import StudyStage

KEPT_SHARE = 0.5
"""Share of the free memory that the weights of all stages may take to stay open together."""


class StageBench:
    """Measures stages with one set of settings, to which each adds its own."""

    def __init__(self, settings: Settings, device: str, work: StageWork) -> None:
        self._settings, self._work = settings, work
        self._device = torch.device(device)
        self._stages: dict[str, StudyStage] = {}
        self._results: dict[str, StageResult] = {}
        self._open: dict[str, OpenStage] = {}
        self._outputs: dict[str, Outputs] = {}
        self._reference: Sequence[Array] = ()
        self.keeps_open = False

    def settings_of(self, stage: StudyStage) -> Settings:
        """The settings of one stage."""
        own: dict[str, Any] = stage.settings_on(self._device.type)
        return msgspec.structs.replace(self._settings, **own)

    def plan_memory(self, stages: Sequence[StudyStage]) -> None:
        """Decide whether all stages stay open together; otherwise every round opens each again."""
        needed = 0.0
        for stage in stages:
            try:
                needed += resident_weight_bytes(resolve(self.settings_of(stage)).spec)
            except RidgelineError:
                continue  # it is refused when it is opened
        self.keeps_open = needed <= KEPT_SHARE * _free_bytes(self._device)

    def open(self, stage: StudyStage) -> None:
        """Open a stage for the first time: its quality, or why it cannot run.

        It is open until it has been measured.
        """
        result = self._empty_result(stage)
        self._stages[stage.name] = stage
        try:
            engine = OpenStage(self.settings_of(stage), self._work)
        except (RidgelineError, RuntimeError) as error:
            self._results[stage.name] = msgspec.structs.replace(result, why_not=_reason(error))
            return
        self._open[stage.name] = engine
        self._outputs[stage.name] = engine.outputs
        quality = engine.compare(self._reference)
        if not self._reference:
            self._reference = engine.distributions()
        self._results[stage.name] = msgspec.structs.replace(
            result,
            uses=engine.uses(),
            load_s=engine.load_s,
            compile_s=engine.compile_s,
            capture_s=engine.capture_s,
            weight_bytes=float(resident_weight_bytes(engine.engine.resolved.spec)),
            quality=quality,
            same_tokens=self._repeats(stage),
        )

    def run_round(self) -> None:
        """Measure every stage that runs once."""
        for name in self._results:
            self.measure(name)

    def measure(self, name: str) -> None:
        """Measure a stage once, if it runs. One that fails does not end the study."""
        result = self._results[name]
        if result.why_not:
            return
        try:
            if name not in self._open:
                self._open[name] = OpenStage(self.settings_of(self._stages[name]), self._work)
            measured = self._open[name].run_round()
        except (RidgelineError, RuntimeError) as error:
            failed = msgspec.structs.replace(result, why_not=_reason(error), rounds=())
            self._results[name] = failed
            self._close_one(name)
            return
        self._results[name] = msgspec.structs.replace(result, rounds=(*result.rounds, measured))
        self._close_spare()

    def leave_out_rest(self, stages: Sequence[StudyStage]) -> None:
        """Say of each of the stages without a measurement that the study was interrupted."""
        for one in stages:
            result = self._results.get(one.name) or self._empty_result(one)
            if not result.rounds and not result.why_not:
                why = "the study was interrupted before it was measured"
                self._results[one.name] = msgspec.structs.replace(result, why_not=why)

    def results(self, bandwidth: Callable[[float], float]) -> tuple[StageResult, ...]:
        """The stages; `bandwidth` gives the bytes per second of a read of a number of bytes."""
        return tuple(
            result
            if result.weight_bytes is None
            else msgspec.structs.replace(result, bandwidth_bytes_s=bandwidth(result.weight_bytes))
            for result in self._results.values()
        )

    def close(self) -> None:
        """Close what is open."""
        for name in tuple(self._open):
            self._close_one(name)

    def _empty_result(self, stage: StudyStage) -> StageResult:
        own = {name: plain(value) for name, value in stage.settings_on(self._device.type).items()}
        return StageResult(name=stage.name, title=stage.title, honesty=stage.honesty, settings=own)

    def _close_one(self, name: str) -> None:
        if name in self._open:
            self._open.pop(name).close()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _close_spare(self) -> None:
        if not self.keeps_open:
            self.close()

    def _repeats(self, stage: StudyStage) -> bool | None:
        """Whether a stage gave the tokens of the stage that it must repeat; None without one."""
        if stage.same_tokens_as not in self._outputs:
            return None
        return self._outputs[stage.name] == self._outputs[stage.same_tokens_as]


def _reason(error: Exception) -> str:
    """One line: the error's own words; its kind if they are not Ridgeline's."""
    text = " ".join(str(error).split())
    return text if isinstance(error, RidgelineError) else f"{type(error).__name__}: {text[:300]}"


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(system.memory().available_bytes)
