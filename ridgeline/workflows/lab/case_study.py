"""The record of a case study: every stage with its figures, or why it could not run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from ridgeline.records import MachineLoad
from ridgeline.report.json_line import plain
from ridgeline.report.result import Result
from ridgeline.workflows.lab.case_study_page import case_study_page
from ridgeline.workflows.lab.study_stages import Honesty

BUSY_SHARE = 0.1
"""Share of the CPU time that others may take before the machine counts as busy."""


class StageRound(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of a stage: decoding alone, without prompts.

    `tok_s`: output tokens per second of all sequences; `step_s`: median seconds of a step with its
    scheduling; `bytes_s`: compulsory bytes of the steps (each weight once, keys and values once)
    per second; `tokens_per_step`: output tokens of one sequence and step.
    """

    tok_s: float
    step_s: float
    bytes_s: float
    tokens_per_step: float


class StageQuality(msgspec.Struct, frozen=True, kw_only=True):
    """The distributions of a stage against those of the first, on the same text.

    `agreement`: share of the positions with the same most likely token; `kl`: mean KL divergence
    from the first stage in nats; `num_tokens`: positions compared.
    """

    agreement: float
    kl: float
    num_tokens: int


class StageResult(msgspec.Struct, frozen=True, kw_only=True):
    """A stage of the study.

    `why_not`: why it could not run here, empty if it ran; nothing else is measured then.
    `settings`: what it sets; `uses`: the backends, data types and graphs that it ran with.
    `compile_s`: seconds that torch.compile took, None without it; `capture_s`: seconds that CUDA
    graphs took. `bandwidth_bytes_s`: what a read of `weight_bytes` reaches on this device.
    `same_tokens`: whether the output is that of the stage that it must repeat, None if it has none.
    """

    name: str
    title: str
    honesty: Honesty
    settings: dict[str, Any]
    why_not: str = ""
    uses: dict[str, str] = {}
    load_s: float | None = None
    compile_s: float | None = None
    capture_s: float | None = None
    weight_bytes: float | None = None
    bandwidth_bytes_s: float | None = None
    quality: StageQuality | None = None
    same_tokens: bool | None = None
    rounds: tuple[StageRound, ...] = ()

    def values(self, name: str) -> list[float]:
        """A figure of every round."""
        return [getattr(one, name) for one in self.rounds]

    def median(self, name: str) -> float | None:
        """The median of a figure over the rounds; None if the stage did not run."""
        return statistics.median(self.values(name)) if self.rounds else None

    @property
    def mbu(self) -> float | None:
        """Share of the bandwidth that the steps achieved: median bytes/s over that of a read."""
        achieved = self.median("bytes_s")
        if achieved is None or not self.bandwidth_bytes_s:
            return None
        return achieved / self.bandwidth_bytes_s


class CaseStudy(Result, frozen=True, kw_only=True):
    """The stages of a case study in order, and the conditions of their measurement.

    `load`: what other processes took meanwhile. `command`: repeats the study. `interrupted`: it has
    fewer rounds than it should have, or stages that were not reached.
    """

    model: str
    device: str
    machine: str
    torch: str
    num_seqs: int
    input_len: int
    output_len: int
    num_rounds: int
    kept_open: bool
    load: MachineLoad | None
    date: str
    command: str
    stages: tuple[StageResult, ...]
    text: str
    interrupted: bool = False

    @property
    def first(self) -> StageResult | None:
        """The first stage that ran: the others are compared with it."""
        return next((stage for stage in self.stages if stage.rounds), None)

    @property
    def is_busy(self) -> bool:
        """Whether others used the machine: figures are then too low."""
        load = self.load
        return load is not None and load.others_share + load.stolen_share > BUSY_SHARE

    def gain(self, stage: StageResult) -> float | None:
        """Median tokens per second of a stage over those of the first."""
        mine, first = stage.median("tok_s"), self.first
        base = None if first is None else first.median("tok_s")
        return None if mine is None or not base else mine / base

    def to_dict(self) -> dict[str, Any]:
        """The record, with the medians and what follows from them in every stage."""
        body: dict[str, Any] = plain(self)
        for table, stage in zip(body["stages"], self.stages, strict=True):
            table |= {
                "tok_s": _spread(stage.values("tok_s")),
                "step_s": _spread(stage.values("step_s")),
                "bytes_s": _spread(stage.values("bytes_s")),
                "mbu": stage.mbu,
                "gain": self.gain(stage),
            }
        return body | {"is_busy": self.is_busy}

    def to_html(self) -> str:
        """The stages as tables, and a drawing of their speed."""
        return case_study_page(self)


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, lowest and highest; None without values."""
    if not values:
        return None
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}
