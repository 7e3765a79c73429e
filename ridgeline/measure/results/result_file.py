"""The content of a result file of any tool in one form: seconds, tokens, requests per second."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ridgeline.errors import BadInput
from ridgeline.records import BUSY_SHARE

LATENCIES = ("ttft", "tpot", "itl", "e2e")
MS = 1e-3
RATES = ("output_tok_s", "request_rate", "goodput")


class LoadedResult(msgspec.Struct, frozen=True, kw_only=True):
    """One result file.

    `samples`: one value per request, in the order of sends, by metric; `ids`: their request ids, if
    known. `figures`: summary values, by `metric_statistic`. `load`: facts that must be equal for
    two results to be comparable; facts that a tool does not record are absent and not compared.
    `busy_share`: share of the CPU that other work took during the run; None: unknown.
    `config`: the configuration of the server. `run`: identifies a run of Ridgeline, whose log and
    result file are the same run ("": unknown).
    """

    source: str
    tool: str
    samples: dict[str, tuple[float, ...]] = {}
    ids: tuple[str, ...] = ()
    figures: dict[str, float] = {}
    load: dict[str, str | float] = {}
    config: dict[str, str] = {}
    invalid: tuple[str, ...] = ()
    run: str = ""
    busy_share: float | None = None

    @property
    def is_busy(self) -> bool:
        """Whether other work took so much of the machine that the figures are not comparable."""
        return self.busy_share is not None and self.busy_share > BUSY_SHARE


def run_key(date: str, seed: object) -> str:
    """Identifies a run in its log and in its result file: the second of its start, and its seed."""
    return f"{date} seed {seed}"


class NotThisFormat(Exception):
    """The file has the format of another tool."""


def missing_file(path: object) -> BadInput:
    """The error for a result file that does not exist."""
    return BadInput(
        "there is no such result file",
        value=str(path),
        fix="correct the path, or write one with `ridgeline bench --log FILE`",
    )


def unreadable_error(path: object, why: str) -> BadInput:
    return BadInput(
        "the file is not a known result file",
        value=str(path),
        limit="Ridgeline event log or JSON, vLLM, GuideLLM, AIPerf, inference-perf, llmperf",
        fix=why,
    )


def parse_summary(name: str, row: Mapping[str, Any], unit: float) -> dict[str, float]:
    """Mean, median and percentiles of a row, flat or under `percentiles`, by `name_statistic`."""
    flat = {**row, **(row.get("percentiles") or {})}
    figures = {}
    for key, value in flat.items():
        label = {"median": "p50", "avg": "mean"}.get(key, key)
        is_statistic = label == "mean" or (
            label[:1] == "p" and label[1:].replace(".", "").isdigit()
        )
        if is_statistic and isinstance(value, int | float):
            figures[f"{name}_{label}"] = value * unit
    return figures


def known_facts(**facts: Any) -> dict[str, str | float]:
    return {name: value for name, value in facts.items() if value is not None}


def known_numbers(**facts: Any) -> dict[str, float]:
    return {name: float(value) for name, value in facts.items() if value is not None}
