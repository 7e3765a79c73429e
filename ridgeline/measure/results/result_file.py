"""One result file in one form. Units: seconds, tokens, requests per second.

`samples` hold one value per request (in the order in which requests were sent) where the file has
them, by request id in `ids` where it names them. `figures` hold what the file only sums up, as
`metric_statistic`. `load` is what has to be equal for two results to be comparable; a fact that a
tool does not write down is absent, and is then not compared. `config` is how the server was set up.
`run` names one run of ours ("": unknown): its log and its result file are not two runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ridgeline.errors import BadInput

LATENCIES = ("ttft", "tpot", "itl", "e2e")
MS = 1e-3
RATES = ("output_tok_s", "request_rate", "goodput")


class LoadedResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one file tells; see the module's head."""

    source: str
    tool: str
    samples: dict[str, tuple[float, ...]] = {}
    ids: tuple[str, ...] = ()
    figures: dict[str, float] = {}
    load: dict[str, str | float] = {}
    config: dict[str, str] = {}
    invalid: tuple[str, ...] = ()
    run: str = ""


def run_of(date: str, seed: object) -> str:
    """What a log and a result of one run have in common: the second it began in, and its seed."""
    return f"{date} seed {seed}"


class NotThisFormat(Exception):
    """The file is another tool's."""


def unreadable(path: object, why: str) -> BadInput:
    return BadInput(
        "not a result file that can be read",
        value=str(path),
        limit="Ridgeline event log or JSON, vLLM, GuideLLM, AIPerf, inference-perf, llmperf",
        fix=why,
    )


def summary_of(name: str, row: Mapping[str, Any], unit: float) -> dict[str, float]:
    """mean, median and percentiles, flat or under `percentiles`, as `name_statistic`."""
    flat = {**row, **(row.get("percentiles") or {})}
    found = {}
    for key, value in flat.items():
        label = {"median": "p50", "avg": "mean"}.get(key, key)
        wanted = label == "mean" or (label[:1] == "p" and label[1:].replace(".", "").isdigit())
        if wanted and isinstance(value, int | float):
            found[f"{name}_{label}"] = value * unit
    return found


def present(**facts: Any) -> dict[str, str | float]:
    return {name: value for name, value in facts.items() if value is not None}


def present_numbers(**facts: Any) -> dict[str, float]:
    return {name: float(value) for name, value in facts.items() if value is not None}
